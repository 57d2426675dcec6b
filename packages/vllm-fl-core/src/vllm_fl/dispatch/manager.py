"""OpManager: resolve an operator to an implementation, bind it, call it, fall back.

``bind`` gives a handle whose attribute ``fn`` is a plain function: the per-token path holds no
lock, environment read, import, policy look-up or context variable. A change of policy, registry
or quarantine advances the manager's epoch and re-binds live handles before it returns.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm_fl.dispatch import discovery, env, state
from vllm_fl.dispatch.availability import Availability
from vllm_fl.dispatch.calls import Callables, Function, Observer
from vllm_fl.dispatch.compare import Comparison
from vllm_fl.dispatch.counters import Counters
from vllm_fl.dispatch.errors import BackendLoadError, RegistrationError
from vllm_fl.dispatch.exits import at_exit
from vllm_fl.dispatch.failure import describe_failure, fall_back
from vllm_fl.dispatch.handle import BoundOp
from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.oplist import OpList
from vllm_fl.dispatch.ops import CATALOGUE, get_spec
from vllm_fl.dispatch.policy import Ranking, SelectionPolicy, rank
from vllm_fl.dispatch.predicate import decision_about, predicate
from vllm_fl.dispatch.quarantine import Quarantine
from vllm_fl.dispatch.registry import OpRegistry
from vllm_fl.dispatch.types import YES, Decision, OpImpl
from vllm_fl.dispatch.usage import Usage

logger = get_logger()
_scoped_policy = state.SCOPED.get


@dataclass(frozen=True)
class Resolution:
    """An operator resolved under a policy.

    Attributes:
        impl: the first choice.
        fn: what to call.
    """

    impl: OpImpl
    fn: Function


class OpManager(state.PolicyListener):
    """The operators of one registry under the policy in force. Thread-safe.

    Args:
        registry: the registry to use; None for a new one.
        register_builtins: whether ``ensure_initialized`` registers the installed backends.

    Attributes:
        registry: who implements what.
        comparison: what VLLM_FL_COMPARE asked for; None while nothing is compared.
        usage: which implementations are in use.
        functions: operator -> what a call under the process-wide policy runs, once it was called.
    """

    def __init__(
        self, registry: OpRegistry | None = None, *, register_builtins: bool = True
    ) -> None:
        self.registry = OpRegistry() if registry is None else registry
        self.comparison: Comparison | None = None
        self.usage = Usage()
        self._lock = threading.RLock()
        self._initialized = not register_builtins
        self._initializing = False
        self._callables = Callables(self.usage.note)
        self._quarantine = Quarantine()
        self._availability = Availability()
        self._told: set[str] = set()
        self._epoch = 0
        self._table: dict[str, Resolution] = {}
        self._scoped_tables: dict[SelectionPolicy, dict[str, Resolution]] = {}
        self.functions: dict[str, Function] = {}
        self._handles: weakref.WeakSet[BoundOp] = weakref.WeakSet()
        self._bound: Counter[str] = Counter()
        self.registry.listen(self._registry_changed)
        state.listen(self)
        live_managers.add(self)

    # -- initialisation

    def ensure_initialized(self) -> None:
        """Register the installed backends, once, and set up what the environment asks for.

        Raises:
            BackendLoadError: a module that VLLM_FL_PLUGIN_MODULES names cannot be used.
            ConfigError: a variable has a value that is not allowed.
        """
        if self._initialized:
            return
        with self._lock:
            if self._initialized or self._initializing:
                return
            self._initializing = True
            try:
                discovery.discover_plugins(self.registry)
                self._read_environment()
                self._initialized = True
            finally:
                self._initializing = False
        for record in discovery.get_discovered_plugins():
            if not record.decision:
                logger.warning("Backend %s is not used: %s", record.name, record.decision.reason)
            for problem in record.problems:
                logger.warning("Backend %s lost an operator: %s", record.name, problem)

    def _read_environment(self) -> None:
        path = env.OPLIST.read() or env.FLAGGEMS_OPLIST.read()
        debug = env.DISPATCH_DEBUG.read()
        comparison = Comparison.from_environment()
        if comparison is not None:
            self.comparison = comparison
            at_exit(self._report_comparison)
        if path is not None:
            self.usage.oplist = OpList(path)
        if debug:
            self.counters.enabled = True
            at_exit(self.counters.report)

    def _report_comparison(self) -> None:
        if self.comparison is not None and self.usage.impl_ids:  # a process may run no operator
            self.comparison.report(self._bound)

    # -- selection

    @property
    def policy_epoch(self) -> int:
        """A number that grows whenever choices are made anew."""
        return self._epoch

    @property
    def counters(self) -> Counters:
        """Counts of calls (while ``count_calls`` is on), declines and fall-backs."""
        return self._callables.counters

    def rank(
        self,
        op_name: str,
        policy: SelectionPolicy | None = None,
        call: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        phase: str = "",
    ) -> Ranking:
        """Rank an operator's implementations.

        Args:
            op_name: the operator.
            policy: the policy; None for the one in force here.
            call: arguments of a call, to leave out implementations that do not take them.
            phase: the phase of the engine's steps; "" for an operator that has none.

        Raises:
            BackendLoadError: the policy is strict, and what decides about the call cannot be
                imported.
            RegistrationError: the policy is strict, and it does not fit the operator.
        """
        self.ensure_initialized()
        get_spec(op_name)
        policy = policy or state.get_policy()

        def takes(impl: OpImpl) -> Decision:
            if call is None:
                return YES
            try:
                decide = predicate(impl)
            except (BackendLoadError, RegistrationError) as error:
                if policy.strict:
                    raise
                return Decision.no(str(error))
            return decision_about(decide, *call)

        return rank(
            op_name,
            self.registry.get_implementations(op_name),
            policy,
            {} if policy.strict else self._quarantine.of(op_name),
            self._availability.of,
            state.device_arch(),
            takes,
            phase,
        )

    def rank_by_phase(
        self,
        op_name: str,
        policy: SelectionPolicy | None = None,
        call: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> dict[str, Ranking]:
        """Rank an operator's implementations in each phase; one ranking, "", where all are alike.

        Args:
            op_name: the operator.
            policy: the policy; None for the one in force here.
            call: arguments of a call, to leave out implementations that do not take them.
        """
        phases = (policy or state.get_policy()).phases(op_name)
        return {phase: self.rank(op_name, policy, call, phase) for phase in phases}

    def first_choices(self) -> dict[str, OpImpl]:
        """Return operator, with its phase where phases have orders -> the first choice for it."""
        rankings = [r for op_name in CATALOGUE for r in self.rank_by_phase(op_name).values()]
        return {ranking.op_name: ranking.order[0] for ranking in rankings if ranking.order}

    def unmatched_vendors(self, policy: SelectionPolicy | None = None) -> list[str]:
        """Say which vendors a policy allows or denies that no backend here has: misspelt ones.

        Args:
            policy: the policy; None for the one in force here.
        """
        self.ensure_initialized()
        groups = self.registry.snapshot().impls_by_op.values()
        vendors = {impl.vendor for group in groups for impl in group if impl.vendor is not None}
        # One that could not be loaded has nothing registered, and tells its name alone.
        vendors |= {b.name for b in discovery.get_discovered_plugins() if not b.decision}
        return (policy or state.get_policy()).unmatched_vendors(vendors)

    def resolve_candidates(self, op_name: str) -> list[OpImpl]:
        """Return the implementations that may run, first choice first.

        Raises:
            NoImplementationError: none may run; the message says why for each.
        """
        return list(self.rank(op_name).require(_hint()))

    def resolve(self, op_name: str) -> Function:
        """Return the first choice as a plain function: no fall-back, no re-binding.

        Raises:
            NoImplementationError: none may run; the message says why for each.
        """
        return self._resolution(op_name, _scoped_policy()).fn

    def get_selected_impl_id(self, op_name: str) -> str:
        """Return the id of the first choice."""
        return self._resolution(op_name, _scoped_policy()).impl.impl_id

    def function(self, impl: OpImpl) -> Function:
        """Return one implementation as a function, whatever the policy says.

        Raises:
            BackendLoadError: it cannot be imported.
            RegistrationError: it does not fit the operator's signature.
        """
        return self._callables.function(impl)

    def bind(self, op_name: str) -> BoundOp:
        """Return a live handle. Bound inside a policy context, it keeps that context's policy.

        Raises:
            NoImplementationError: none may run; the message says why for each.
        """
        scoped = _scoped_policy()
        self._resolution(op_name, scoped)
        with self._lock:
            handle = BoundOp(self, op_name, self._bound[op_name], scoped)
            self._bound[op_name] += 1
            self._handles.add(handle)
        self._rebind(handle)
        return handle

    def call(self, op_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an operator under the policy in force here; see :meth:`recover` for errors."""
        try:
            fn = self.functions[op_name] if _scoped_policy() is None else self.enter(op_name)
        except KeyError:
            fn = self.enter(op_name)
        try:
            # Without the empty dictionary the call is a third cheaper.
            return fn(*args, **kwargs) if kwargs else fn(*args)
        except Exception as error:
            return self.recover(op_name, fn, state.get_policy(), error, args, kwargs)

    def enter(self, op_name: str) -> Function:
        """Return what a call under the policy in force here runs, noted as in use.

        Under the process-wide policy ``functions`` has it from then on, until choices change.

        Raises:
            NoImplementationError: none may run; the message says why for each.
        """
        scoped = _scoped_policy()
        resolution = self._resolution(op_name, scoped)
        self.usage.note(resolution.impl)
        if scoped is None:
            with self._lock:
                if self._table.get(op_name) is resolution:
                    self.functions[op_name] = resolution.fn
        return resolution.fn

    def bound(self) -> set[OpImpl]:
        """Return the implementations that live handles call first."""
        with self._lock:
            handles = tuple(self._handles)
        return {handle.impl for handle in handles if handle.impl is not None}

    # -- failure

    def recover(
        self,
        op_name: str,
        fn: Function,
        policy: SelectionPolicy,
        error: Exception,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Answer a call in which ``fn`` raised ``error``: try the next ones, or re-raise it.

        The implementation that ``fn`` is gets quarantined, with the error as the reason, when
        another one then answers the same call; if all fail, the call is at fault.

        Raises:
            Exception: ``error`` itself, with the operator, implementation, shapes and dtypes
                added as a note, when the policy is strict, the memory was exhausted, the call
                does not fit the operator, donated arguments may be overwritten, or nothing is
                left to try.
        """
        impl = self._callables.owner(op_name, fn, args, kwargs)
        if impl is None:  # nothing ran, and ``error`` says why
            raise error
        followers = self._followers(impl, policy, args, kwargs)
        follower, result = fall_back(error, impl, followers, args, kwargs, policy.strict)
        self.counters.fell_back(op_name, impl.impl_id)
        reason = f"{type(error).__name__}: {error}"
        context = describe_failure(impl, args, kwargs)
        self._put_in_quarantine(impl, reason, f"{follower.impl_id} takes over. {context}")
        return result

    def _followers(
        self,
        impl: OpImpl,
        policy: SelectionPolicy,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Iterator[tuple[OpImpl, Function]]:
        """Yield what may answer a call after ``impl``; what cannot be loaded is passed over."""
        order = self.rank(impl.op_name, policy, (args, kwargs)).order
        place = next((i for i, c in enumerate(order) if c.impl_id == impl.impl_id), -1)
        for follower in order[place + 1 :]:
            try:
                fn = self.function(follower)
            except (BackendLoadError, RegistrationError) as error:
                self._put_in_quarantine(follower, str(error), "the next one is taken")
            else:
                yield follower, fn

    def _put_in_quarantine(self, impl: OpImpl, reason: str, consequence: str) -> None:
        if self._quarantine.put(impl.op_name, impl.impl_id, reason):
            logger.warning(
                "%s of %s is out until the policy changes: %s; %s",
                impl.impl_id, impl.op_name, reason, consequence,
            )  # fmt: skip
            self._forget_choices()

    def get_failed_impls(self, op_name: str | None = None) -> dict[str, dict[str, str]]:
        """Return operator -> implementation id -> why it is in quarantine."""
        failed = self._quarantine.copy()
        return {op: reasons for op, reasons in failed.items() if op_name in (None, op)}

    def clear_failed_impls(self, op_name: str | None = None) -> None:
        """Let implementations out of quarantine, of one operator or of all."""
        self._quarantine.clear(op_name)
        self._forget_choices()

    # -- change

    def bump_policy_epoch(self) -> None:
        """Make every choice anew: availability is asked again and the quarantine is lifted."""
        self._availability.forget()
        self._quarantine.clear()
        self._forget_choices()

    def policy_changed(self) -> None:
        """Told by the process-wide policy after it has changed."""
        self.bump_policy_epoch()

    def count_calls(self, enabled: bool = True) -> None:
        """Switch counting of calls on or off; the plain path counts nothing."""
        self.counters.enabled = enabled
        self._forget_choices()

    def observe(self, observer: Observer | None) -> None:
        """Have ``observer(impl, fn)`` called in place of each function; None ends it."""
        self._callables.observer = observer
        self._forget_choices()

    def _registry_changed(self) -> None:
        """What has been replaced or removed gets another chance, and is asked again."""
        self._availability.forget()
        for op_name, failed in self._quarantine.copy().items():
            for impl_id in failed:
                if self.registry.get_implementation(op_name, impl_id) is None:
                    self._quarantine.release(op_name, impl_id)
        self._forget_choices()

    def _forget_choices(self) -> None:
        with self._lock:
            self._epoch += 1
            self._table = {}
            self._scoped_tables = {}
            self.functions = {}
            handles = tuple(self._handles)
        for handle in handles:
            self._rebind(handle)

    def _rebind(self, handle: BoundOp) -> None:
        while True:
            epoch = self._epoch
            impl: OpImpl | None = None
            try:
                resolution = self._resolution(handle.op_name, handle.scoped)
                impl, fn = resolution.impl, resolution.fn
                if self.comparison is not None:
                    policy = handle.scoped or state.get_global_policy()
                    compared = self.comparison.of_layer(impl, fn, handle.number, policy, self.rank)
                    fn = self._callables.own_as(handle.op_name, compared, fn)
            except Exception as error:  # of a backend, too: the other handles must follow
                fn = _raiser(error)
            with self._lock:
                if epoch != self._epoch:
                    continue
                handle.impl, handle.fn = impl, fn
            if impl is not None:
                self.usage.note(impl)
            return

    def _resolution(self, op_name: str, scoped: SelectionPolicy | None) -> Resolution:
        """Return the resolution under ``scoped`` (None: the process-wide policy), cached.

        User code (availability, imports) runs outside the lock; a result that a change has
        overtaken is computed again.
        """
        while True:
            epoch = self._epoch
            table = self._table if scoped is None else self._scoped_tables.get(scoped, {})
            resolution = table.get(op_name)
            if resolution is None:
                resolution = self._choose(op_name, scoped or state.get_global_policy())
            with self._lock:
                if epoch != self._epoch:
                    continue
                if scoped is not None:
                    table = self._scoped_tables.setdefault(scoped, {})
                    return table.setdefault(op_name, resolution)
                return self._table.setdefault(op_name, resolution)

    def _choose(self, op_name: str, policy: SelectionPolicy) -> Resolution:
        """Resolve an operator; an implementation that cannot be loaded gives way to the next."""
        for problem in self.unmatched_vendors(policy):
            if problem not in self._told:
                self._told.add(problem)
                logger.warning("%s", problem)
        while True:
            ranking = self.rank(op_name, policy)
            order = ranking.require(_hint())
            broken = self._first_broken(order)
            if broken is None:
                break
            impl, error = broken
            if policy.strict:
                raise error
            self._put_in_quarantine(impl, str(error), "the next one is taken")
        if env.DISPATCH_DEBUG.read():
            logger.info("%s", ranking.summary)
        return Resolution(order[0], self._callables.first_that_takes(order))

    def _first_broken(self, order: tuple[OpImpl, ...]) -> tuple[OpImpl, Exception] | None:
        for impl in order:
            try:
                self.function(impl)
                if predicate(impl) is None:
                    return None
            except (BackendLoadError, RegistrationError) as error:
                return impl, error
        return None

    def reinit_after_fork(self) -> None:
        """Make locks usable in a forked child, where their holder no longer runs.

        What the parent counted and compared is the parent's to report.
        """
        self._lock = threading.RLock()
        self._initializing = False
        self._quarantine.reinit_lock_after_fork()
        self.usage.reinit_lock_after_fork()
        self.registry.reinit_lock_after_fork()
        self.counters.reset()
        if self.comparison is not None:
            self.comparison.reset()


live_managers: weakref.WeakSet[OpManager] = weakref.WeakSet()


def _raiser(error: Exception) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise error

    return refuse


def _hint() -> str:
    """Say which backends could not be used, for the message of a failed resolution."""
    lost = [b for b in discovery.get_discovered_plugins() if not b.decision]
    lines = [f"  Backend {b.name} is not used: {b.decision.reason}" for b in lost]
    lines.append(
        "Install a wheel that implements it (vllm-fl-reference has every operator), or relax the "
        "policy; `vllm-fl explain OP` shows each decision."
    )
    return "\n".join(lines)
