"""Resolve an operator to an implementation, bind it, call it, and fall back.

``bind`` gives a handle whose attribute ``fn`` is a plain function: the per-token path holds no
lock, environment read, import, policy look-up or context variable. A change of policy, registry
or quarantine advances the manager's epoch and re-binds live handles before it returns.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_fl.dispatch import discovery, env, state
from vllm_fl.dispatch.counters import Counters
from vllm_fl.dispatch.errors import NoImplementationError, add_context
from vllm_fl.dispatch.failure import describe_call, may_retry
from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.ops import get_spec
from vllm_fl.dispatch.policy import Ranking, SelectionPolicy, rank
from vllm_fl.dispatch.predicate import predicate
from vllm_fl.dispatch.registry import OpRegistry
from vllm_fl.dispatch.types import YES, Decision, OpImpl

logger = get_logger()
_scoped_policy = state.SCOPED.get


@dataclass(frozen=True)
class Resolution:
    """An operator resolved under a policy.

    Attributes:
        ranking: the order and the refusals.
        impl: the first choice.
        fn: what to call.
    """

    ranking: Ranking
    impl: OpImpl
    fn: Callable[..., Any]


class BoundOp:
    """A live handle on an operator: call it, or call its ``fn`` and pass errors to ``recover``.

    Attributes:
        op_name: the operator.
        fn: the chosen implementation; replaced when the choice changes.
        impl: which implementation ``fn`` is; None when none may run (``fn`` then raises).
    """

    __slots__ = ("__weakref__", "_manager", "_policy", "fn", "impl", "op_name")

    op_name: str
    fn: Callable[..., Any]
    impl: OpImpl | None

    def __init__(self, manager: OpManager, op_name: str, policy: SelectionPolicy | None) -> None:
        self.op_name = op_name
        self._manager = manager
        self._policy = policy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the implementation; on an error fall back where that is allowed."""
        fn = self.fn
        try:
            return fn(*args, **kwargs) if kwargs else fn(*args)
        except Exception as error:
            return self.recover(fn, error, *args, **kwargs)

    def recover(
        self, fn: Callable[..., Any], error: Exception, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Answer a call in which ``fn`` raised ``error``: try the next one, or re-raise.

        A layer that calls ``fn`` itself inside ``try`` hands what it caught to this method.
        """
        policy = self._policy or state.get_global_policy()
        return self._manager.recover(self.op_name, fn, policy, error, args, kwargs)

    def __repr__(self) -> str:
        return f"BoundOp({self.op_name!r} -> {self.impl.impl_id if self.impl else None!r})"


class OpManager(state.PolicyListener):
    """The operators of one registry under the policy in force. Thread-safe.

    Args:
        registry: the registry to use; None for a new one.
        register_builtins: whether ``ensure_initialized`` registers the installed backends.
    """

    def __init__(
        self, registry: OpRegistry | None = None, *, register_builtins: bool = True
    ) -> None:
        self.registry = OpRegistry() if registry is None else registry
        self.registry.listen(self._forget_choices)
        self.counters = Counters()
        self._lock = threading.RLock()
        self._initialized = not register_builtins
        self._initializing = False
        self._epoch = 0
        self._table: dict[str, Resolution] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._scoped_tables: dict[SelectionPolicy, dict[str, Resolution]] = {}
        self._owners: dict[tuple[str, int], tuple[Callable[..., Any], tuple[OpImpl, ...]]] = {}
        self._availability: dict[object, Decision] = {}
        self._quarantine: dict[str, dict[str, str]] = {}
        self._handles: weakref.WeakSet[BoundOp] = weakref.WeakSet()
        state.listen(self)
        _managers.add(self)

    # -- initialisation

    def ensure_initialized(self) -> None:
        """Register the installed backends, once.

        Raises:
            BackendLoadError: a module that VLLM_FL_PLUGIN_MODULES names cannot be used.
        """
        if self._initialized:
            return
        with self._lock:
            if self._initialized or self._initializing:
                return
            self._initializing = True
            try:
                discovery.discover_plugins(self.registry)
                self.counters.enabled |= env.DISPATCH_DEBUG.read()
                self._initialized = True
            finally:
                self._initializing = False
        for record in discovery.get_discovered_plugins():
            if not record.decision:
                logger.warning("Backend %s is not used: %s", record.name, record.decision.reason)
            for problem in record.problems:
                logger.warning("Backend %s lost an operator: %s", record.name, problem)

    # -- selection

    @property
    def policy_epoch(self) -> int:
        """A number that grows whenever choices are made anew."""
        return self._epoch

    def rank(
        self,
        op_name: str,
        policy: SelectionPolicy | None = None,
        call: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> Ranking:
        """Rank an operator's implementations.

        Args:
            op_name: the operator.
            policy: the policy; None for the one in force here.
            call: arguments of a call, to leave out implementations that do not take them.
        """
        self.ensure_initialized()
        get_spec(op_name)

        def takes(impl: OpImpl) -> Decision:
            decide = predicate(impl) if call is not None else None
            return YES if decide is None or call is None else decide(*call[0], **call[1])

        return rank(
            op_name,
            self.registry.get_implementations(op_name),
            policy or state.get_policy(),
            self._quarantine.get(op_name, {}),
            self._ask_availability,
            state.device_arch(),
            takes,
        )

    def resolve_candidates(self, op_name: str) -> list[OpImpl]:
        """Return the implementations that may run, first choice first.

        Raises:
            NoImplementationError: none may run; the message says why for each.
        """
        return list(self.rank(op_name).require(_hint()))

    def resolve(self, op_name: str) -> Callable[..., Any]:
        """Return the first choice as a plain function: no fall-back, no re-binding.

        Raises:
            NoImplementationError: none may run; the message says why for each.
        """
        return self._resolution(op_name, state.SCOPED.get()).fn

    def get_selected_impl_id(self, op_name: str) -> str:
        """Return the id of the first choice."""
        return self._resolution(op_name, state.SCOPED.get()).impl.impl_id

    def bind(self, op_name: str) -> BoundOp:
        """Return a live handle. Bound inside a policy context, it keeps that context's policy.

        Raises:
            NoImplementationError: none may run; the message says why for each.
        """
        handle = BoundOp(self, op_name, state.SCOPED.get())
        self._resolution(op_name, handle._policy)
        self._handles.add(handle)
        self._rebind(handle)
        return handle

    def call(self, op_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an operator under the policy in force here; see :meth:`recover` for errors."""
        fn = self._functions.get(op_name) if _scoped_policy() is None else None
        if fn is None:
            fn = self.resolve(op_name)
        try:
            # Without the empty dictionary the call is a third cheaper.
            return fn(*args, **kwargs) if kwargs else fn(*args)
        except Exception as error:
            return self.recover(op_name, fn, state.get_policy(), error, args, kwargs)

    # -- failure

    def recover(
        self,
        op_name: str,
        fn: Callable[..., Any],
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
        impl = self._owner(op_name, fn, args, kwargs)
        if impl is None:  # nothing may run, and ``error`` says why
            raise error
        context = f"in operator {op_name!r}, implementation {impl.impl_id!r}, called with "
        context += describe_call(args, kwargs)
        decision = may_retry(error, get_spec(op_name), impl, args, kwargs, policy.strict)
        followers: tuple[OpImpl, ...] = ()
        if decision:
            order = self.rank(op_name, policy, (args, kwargs)).order
            place = next((i for i, c in enumerate(order) if c.impl_id == impl.impl_id), -1)
            followers = order[place + 1 :]
            decision = Decision(bool(followers), "no other implementation may run")
        for follower in followers:
            try:
                result = self.function(follower)(*args, **kwargs)
            except Exception as second:
                add_context(error, f"{follower.impl_id!r} failed, too: {second!r}")
                decision = may_retry(second, get_spec(op_name), follower, args, kwargs, False)
                if not decision:
                    break
            else:
                self._put_in_quarantine(op_name, impl, follower, error, context)
                return result
        add_context(error, f"{context} ({decision.reason or 'every implementation failed'})")
        raise error

    def _put_in_quarantine(
        self, op_name: str, impl: OpImpl, follower: OpImpl, error: Exception, context: str
    ) -> None:
        reason = f"{type(error).__name__}: {error}"
        with self._lock:
            failed = self._quarantine.setdefault(op_name, {})
            news = impl.impl_id not in failed
            failed[impl.impl_id] = reason
        self.counters.fell_back(op_name, impl.impl_id)
        if news:
            logger.warning(
                "%s of %s failed and is out until the policy changes; %s takes over. %s %s",
                impl.impl_id, op_name, follower.impl_id, reason, context,
            )  # fmt: skip
            self._forget_choices()

    def get_failed_impls(self, op_name: str | None = None) -> dict[str, dict[str, str]]:
        """Return operator -> implementation id -> why it is in quarantine."""
        with self._lock:
            return {
                op: dict(failed)
                for op, failed in self._quarantine.items()
                if failed and op_name in (None, op)
            }

    def clear_failed_impls(self, op_name: str | None = None) -> None:
        """Let implementations out of quarantine, of one operator or of all."""
        with self._lock:
            for op in list(self._quarantine) if op_name is None else [op_name]:
                self._quarantine.pop(op, None)
        self._forget_choices()

    # -- change

    def bump_policy_epoch(self) -> None:
        """Make every choice anew: availability is asked again and the quarantine is lifted."""
        with self._lock:
            self._availability = {}
            self._quarantine = {}
        self._forget_choices()

    def policy_changed(self) -> None:
        """Told by the process-wide policy after it has changed."""
        self.bump_policy_epoch()

    def count_calls(self, enabled: bool = True) -> None:
        """Switch counting of calls on or off; the plain path counts nothing."""
        self.counters.enabled = enabled
        self._forget_choices()

    def _forget_choices(self) -> None:
        with self._lock:
            self._epoch += 1
            self._table = {}
            self._functions = {}
            self._scoped_tables = {}
        for handle in tuple(self._handles):
            self._rebind(handle)

    def _rebind(self, handle: BoundOp) -> None:
        while True:
            epoch = self._epoch
            impl: OpImpl | None = None
            try:
                resolution = self._resolution(handle.op_name, handle._policy)
                fn, impl = resolution.fn, resolution.impl
            except NoImplementationError as error:
                fn = _raiser(error)
            with self._lock:
                if epoch == self._epoch:
                    handle.impl, handle.fn = impl, fn
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
                resolution = self._table.setdefault(op_name, resolution)
                self._functions[op_name] = resolution.fn
                return resolution

    def _choose(self, op_name: str, policy: SelectionPolicy) -> Resolution:
        ranking = self.rank(op_name, policy)
        order = ranking.require(_hint())
        fn = self._first_that_takes(op_name, order)
        if env.DISPATCH_DEBUG.read():
            refused = "; ".join(f"{i.impl_id}: {d.reason}" for i, d in ranking.rejected)
            rest = ", ".join(i.impl_id for i in order[1:])
            logger.info(
                "%s -> %s (%s)%s%s", op_name, order[0].impl_id, order[0].wheel or "by hand",
                f"; then {rest}" if rest else "", f"; refused: {refused}" if refused else "",
            )  # fmt: skip
        return Resolution(ranking, order[0], fn)

    def function(self, impl: OpImpl) -> Callable[..., Any]:
        """Return an implementation as what is called: loaded, checked, counted if that is on."""
        fn = impl.load()
        get_spec(impl.op_name).check(fn, f"{impl.impl_id} ({impl.wheel or 'by hand'})")
        if self.counters.enabled:
            fn = self.counters.counted(impl, fn)
        self._owners[impl.op_name, id(fn)] = (fn, (impl,))
        return fn

    def _first_that_takes(self, op_name: str, order: tuple[OpImpl, ...]) -> Callable[..., Any]:
        """Return what calls the first implementation in ``order`` that takes the arguments.

        The first choice itself, if it takes whatever the operator takes.
        """
        steps = []
        for impl in order:
            steps.append((predicate(impl), self.function(impl), impl))
            if steps[-1][0] is None:
                break
        if len(steps) == 1 and steps[0][0] is None:
            return steps[0][1]
        counters = self.counters if self.counters.enabled else None

        def choose_and_call(*args: Any, **kwargs: Any) -> Any:
            for decide, fn, impl in steps:
                if decide is None or decide(*args, **kwargs).accepted:
                    return fn(*args, **kwargs)
                if counters is not None:
                    counters.declined(impl)
            raise self._nobody_takes(op_name, args, kwargs)

        self._owners[op_name, id(choose_and_call)] = (choose_and_call, tuple(s[2] for s in steps))
        return choose_and_call

    def _nobody_takes(
        self, op_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NoImplementationError:
        ranking = self.rank(op_name, call=(args, kwargs))
        try:
            ranking.require(f"Called with {describe_call(args, kwargs)}.")
        except NoImplementationError as error:
            return error
        return NoImplementationError(f"The choice for {op_name!r} changed during a call.")

    def _owner(
        self, op_name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OpImpl | None:
        """Return which implementation ``fn`` ran, also after the choice has changed."""
        _, order = self._owners.get((op_name, id(fn)), (fn, ()))
        for impl in order:
            decide = predicate(impl)
            if decide is None or decide(*args, **kwargs).accepted:
                return impl
        return None

    def _ask_availability(self, impl: OpImpl) -> Decision:
        """Ask each backend once an epoch."""
        probe = impl.available or impl.impl_id
        decision = self._availability.get(probe)
        if decision is None:
            decision = self._availability[probe] = impl.availability()
        return decision

    def reinit_lock_after_fork(self) -> None:
        """Replace the locks in a forked child, where their holder no longer runs."""
        self._lock = threading.RLock()
        self._initializing = False
        self.registry.reinit_lock_after_fork()
        self.counters.reset()


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


_managers: weakref.WeakSet[OpManager] = weakref.WeakSet()
_default: OpManager | None = None
_default_lock = threading.Lock()


def get_default_manager() -> OpManager:
    """Return the process's manager, made on first use."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = OpManager()
    return _default


def reset_default_manager() -> None:
    """Drop the process's manager and what discovery found; handles of the old one stay as is."""
    global _default
    with _default_lock:
        _default = None
    discovery.clear_discovered_plugins()


def call_op(op_name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call an operator through the process's manager; see :meth:`OpManager.call`."""
    # The body of OpManager.call, to save the second frame and packing of arguments.
    manager = _default or get_default_manager()
    fn = manager._functions.get(op_name) if _scoped_policy() is None else None
    if fn is None:
        fn = manager.resolve(op_name)
    try:
        return fn(*args, **kwargs) if kwargs else fn(*args)
    except Exception as error:
        return manager.recover(op_name, fn, state.get_policy(), error, args, kwargs)


def resolve_op(op_name: str) -> Callable[..., Any]:
    """Return the chosen implementation of an operator as a plain function."""
    return get_default_manager().resolve(op_name)


def bind_op(op_name: str) -> BoundOp:
    """Return a live handle on an operator; layers hold one and call its ``fn``."""
    return get_default_manager().bind(op_name)


def _after_fork_in_child() -> None:
    global _default_lock
    _default_lock = threading.Lock()
    state.reinit_lock_after_fork()
    discovery.reinit_lock_after_fork()
    for manager in tuple(_managers):
        manager.reinit_lock_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
