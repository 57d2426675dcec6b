"""Backend, the class that a wheel's entry point names, and Device, what it may bring to vLLM.

The module of a backend must be light: it states facts and names functions as text, so that
listing the installed backends imports neither torch nor any vendor library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_fl.dispatch.errors import RegistrationError
from vllm_fl.dispatch.ops import CATALOGUE, get_spec
from vllm_fl.dispatch.types import BackendImplKind, OpImpl

BACKEND_API = (1, 0)
"""The (major, minor) version of what this module defines; a backend states the one it needs."""

_IMPL_IDS = {
    BackendImplKind.DEFAULT: "default.flagos",
    BackendImplKind.REFERENCE: "reference.torch",
}


@dataclass(frozen=True)
class Device:
    """A device that vLLM can run on through this backend.

    Attributes:
        name: torch's device type ("cpu", "cuda", "npu").
        platform: vLLM platform class, ``"package.module:Class"``.
        detect: whether this machine has the device; must not initialise it (a process that has
            touched CUDA cannot fork). Returns a bool, a Decision, or a text that says why not.
        defaults: the platform's defaults file, ``"package:file.yaml"``; None for none.
        rank: order among devices that are all present; the CPU has 0, accelerators 100.
        arch: tells the architecture as 10 * major + minor, without initialising the device.
    """

    name: str
    platform: str
    detect: Callable[[], object]
    defaults: str | None = None
    rank: int = 100
    arch: Callable[[], int | None] = lambda: None


@dataclass(frozen=True)
class Implementation:
    """An entry of :attr:`Backend.operators` with more to say than where the function is.

    Attributes: as in :class:`~vllm_fl.dispatch.types.OpImpl`.
    """

    fn: str
    supports: str | None = None
    dtypes: tuple[str, ...] | None = None
    min_arch: int | None = None
    traceable: bool = True
    in_place: bool = True
    note: str = ""


@dataclass(frozen=True)
class ExpertsShape:
    """A mixture-of-experts layer of the model, as its kernels see it.

    Attributes:
        k: choices of a token.
        routed: experts that the router chooses from.
        groups: groups that they are in; 1 for none.
        experts: range of the chosen numbers, redundant experts included.
        local: experts whose weights this rank has.
        hidden: size of the hidden state.
        inner: size between the two products, on this rank.
        itemsize: bytes of an element of the hidden state.
        ranks: data-parallel ranks whose tokens the layer gets together.
    """

    k: int
    routed: int
    groups: int
    experts: int
    local: int
    hidden: int
    inner: int
    itemsize: int
    ranks: int = 1


class Backend:
    """Base class of a backend. A subclass states facts; nothing here touches a device.

    Attributes:
        name: the backend's name, equal to the name of its entry point.
        kind: DEFAULT, VENDOR or REFERENCE.
        vendor: the vendor's name, for kind VENDOR; users write it in ``vendor:<name>``.
        api_version: the ``BACKEND_API`` that the backend was written for.
        operators: operator -> ``"package.module:function"`` or :class:`Implementation`. A method
            of the subclass that has an operator's name is an implementation, too.
        device: the device that the backend brings to vLLM, if any.
        known_failures: cases of the conformance kit (``vllm_fl.testing``) that are known to fail:
            glob over case ids -> reason.
        kernels: for ``vllm-fl profile``, which kernels the backend brings or knows: glob over the
            names that torch.profiler shows -> (what the kernel computes, where it comes from).
            Kernels that Triton has compiled are known by the modules of their functions, not by
            their names: a glob that starts with ``triton:`` is matched against the module, and
            without one they come from the module's top-level package. An empty first text stands
            for the kernel's own name. The longest matching glob counts.
        packages: distributions beside the wheel whose versions decide about speed: a tuned
            configuration is for the versions that it was measured on.
    """

    name: ClassVar[str]
    kind: ClassVar[BackendImplKind] = BackendImplKind.VENDOR
    vendor: ClassVar[str | None] = None
    api_version: ClassVar[tuple[int, int]] = BACKEND_API
    operators: ClassVar[Mapping[str, str | Implementation]] = {}
    device: ClassVar[Device | None] = None
    known_failures: ClassVar[Mapping[str, str]] = {}
    kernels: ClassVar[Mapping[str, tuple[str, str]]] = {}
    packages: ClassVar[tuple[str, ...]] = ()

    def is_available(self) -> object:
        """Whether the backend's operators can run here: a bool, a Decision, or why not as text."""
        return True

    def knows(self, name: str) -> object:
        """Whether ``flagos_whitelist`` and ``flagos_blacklist`` may hold a name for this backend.

        Asked for names that the catalogue does not have; the same answers as ``is_available``.
        """
        return False

    def start_worker(self, rank: int) -> None:
        """Called in each process that runs a model, when the device is set and before it is built.

        A process may build more than one model, under another policy. What it raises stops the
        process if it is a VllmFLError or the policy is strict; else it is logged.

        Args:
            rank: the process's rank among those that run the model.
        """

    def warmup_tokens(self, most: int, experts: Sequence[ExpertsShape]) -> Iterable[range]:
        """Ranges of token counts in which the same variants of the backend's kernels run.

        The model runs with one count of each range before it serves, so that nothing compiles
        later. Called in the worker, when the model is loaded; only for a backend that runs one of
        its operators. Attention is not part of these runs: its implementation has ``warm_up``
        (:mod:`vllm_fl.integration.warmup`).

        Args:
            most: the largest number of tokens of a step.
            experts: the model's mixture-of-experts layers, each shape once.

        Returns:
            Ranges within 1 to ``most``, both included; empty ones are left out. Another answer
            stops the engine. What is raised does so, too, if it is a VllmFLError or the policy is
            strict; else it is logged, and kernels are compiled at the first request.
        """
        return ()

    def facts(self) -> Mapping[str, object]:
        """More to tell in `vllm-fl doctor`; must not touch a device."""
        return {}

    def implementations(self) -> Iterator[OpImpl | Exception]:
        """Yield one OpImpl for each operator, or the error that this operator alone lost to."""
        methods = [op for op in CATALOGUE if callable(getattr(self, op, None))]
        for op_name in (*self.operators, *(op for op in methods if op not in self.operators)):
            try:
                get_spec(op_name)
                yield self._implementation(op_name)
            except Exception as error:
                yield error

    def _implementation(self, op_name: str) -> OpImpl:
        declared = self.operators.get(op_name)
        if isinstance(declared, str):
            declared = Implementation(declared)
        if not isinstance(declared, (Implementation, type(None))):
            raise RegistrationError(
                f"{self.name}: operators[{op_name!r}] is {declared!r}. Allowed: 'module:function', "
                "or an Implementation."
            )
        declared_facts = vars(declared) if declared is not None else {"fn": getattr(self, op_name)}
        return OpImpl(
            op_name=op_name,
            impl_id=_IMPL_IDS.get(self.kind, f"vendor.{self.vendor}"),
            kind=self.kind,
            vendor=self.vendor,
            available=self.is_available,
            **declared_facts,
        )
