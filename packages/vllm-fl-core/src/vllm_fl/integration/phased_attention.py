"""One attention backend for vLLM out of two: one for steps that only decode, one for all others.

The metadata builder knows the phase of a step and asks the phase's own builder alone; the layer
follows the metadata. Steps of pure decode are whole CUDA graphs, so that the choice is made when
they are captured. Both parts read and write one cache, so its layout must be the same.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from vllm_fl.dispatch.phases import DECODE, PHASES, PREFILL

_NUMBERS = {"num_blocks": 7, "block_size": 64, "num_kv_heads": 3, "head_size": 128}
"""Sizes of a cache to compare layouts by, each another one."""


@dataclass
class PhasedMetadata:
    """One step of one KV cache group.

    Attributes:
        phase: the phase of the step.
        metadata: what the builder of the phase has made.
    """

    phase: str
    metadata: Any


class PhasedImpl(AttentionImpl[Any]):
    """One layer's attention: an implementation for each phase."""

    backends: ClassVar[dict[str, type[AttentionBackend]]]

    def __init__(
        self, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any
    ) -> None:
        """Make both implementations with the arguments of one."""
        self.parts: dict[str, Any] = {
            phase: backend.get_impl_cls()(num_heads, head_size, scale, *args, **kwargs)
            for phase, backend in self.backends.items()
        }
        prefill = self.parts[PREFILL]
        # What vLLM reads of an implementation: to describe the layer, and to quantise queries.
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = prefill.num_kv_heads
        self.kv_cache_dtype = prefill.kv_cache_dtype
        self.supports_quant_query_input = all(
            part.supports_quant_query_input for part in self.parts.values()
        )
        writers = [p for p in self.backends if not _writes_in_forward(self.backends[p])]
        if writers:
            self.do_kv_cache_update = self.parts[writers[0]].do_kv_cache_update

    def process_weights_after_loading(self, act_dtype: Any) -> None:
        """Let both prepare what they need."""
        for part in self.parts.values():
            part.process_weights_after_loading(act_dtype)

    def warm_up(self, kv_cache: Any, vllm_config: Any, phases: Collection[str] = PHASES) -> None:
        """Let each implementation that can compile what its phase alone needs."""
        for phase, part in self.parts.items():
            if phase in phases and hasattr(part, "warm_up"):
                part.warm_up(kv_cache, vllm_config, (phase,))

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: PhasedMetadata | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Attend with the implementation of the step's phase; without a step, with prefill's."""
        if attn_metadata is None:
            part, metadata = self.parts[PREFILL], None
        else:
            part, metadata = self.parts[attn_metadata.phase], attn_metadata.metadata
        return part.forward(layer, query, key, value, kv_cache, metadata, *args, **kwargs)


class PhasedMetadataBuilder(AttentionMetadataBuilder[PhasedMetadata]):
    """Asks the builder of the step's phase."""

    backends: ClassVar[dict[str, type[AttentionBackend]]]

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        """Make a builder for each phase, which sees the layers as its own implementation's."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.parts: dict[str, Any] = {
            phase: backend.get_builder_cls()(
                kv_cache_spec, layer_names, _seen_in(phase, vllm_config), device
            )
            for phase, backend in self.backends.items()
        }
        thresholds = [part.reorder_batch_threshold for part in self.parts.values()]
        self.reorder_batch_threshold = min((t for t in thresholds if t is not None), default=None)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return decode's support for steps of decode, and no more than that of uniform steps.

        A graph that serves any step would keep one phase's implementation, whichever the step.
        """
        support = {
            phase: backend.get_builder_cls().get_cudagraph_support(vllm_config, kv_cache_spec)
            for phase, backend in cls.backends.items()
        }
        # Uniform steps of several tokens a request are prefill's.
        uniform, single = (
            AttentionCGSupport.UNIFORM_BATCH,
            AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        )
        most = uniform if support[PREFILL].value >= uniform.value else single
        return min(support[DECODE], most, key=lambda level: int(level.value))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PhasedMetadata:
        """Return the step's metadata, made by its phase's builder."""
        phase = phase_of(common_attn_metadata.max_query_len)
        part = self.parts[phase]
        return PhasedMetadata(
            phase, part.build(common_prefix_len, common_attn_metadata, fast_build)
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> PhasedMetadata:
        """Return metadata to capture a step of this form with, made by its phase's builder."""
        phase = phase_of(common_attn_metadata.max_query_len)
        part = self.parts[phase]
        return PhasedMetadata(phase, part.build_for_cudagraph_capture(common_attn_metadata))

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> PhasedMetadata:
        """Return the metadata of a step of a draft model, made by its phase's builder."""
        phase = phase_of(common_attn_metadata.max_query_len)
        part = self.parts[phase]
        return PhasedMetadata(phase, part.build_for_drafting(common_attn_metadata, draft_index))

    def use_cascade_attention(
        self, common_prefix_len: int, query_lens: Any, *args: Any, **kwargs: Any
    ) -> bool:
        """Return whether the builder of the step's phase wants cascade attention."""
        part = self.parts[phase_of(int(query_lens.max()))]
        return bool(part.use_cascade_attention(common_prefix_len, query_lens, *args, **kwargs))


class PhasedBackend(AttentionBackend):
    """What both backends can do. Made by :func:`by_phase`."""

    backends: ClassVar[dict[str, type[AttentionBackend]]]
    impl_cls: ClassVar[type[PhasedImpl]]
    builder_cls: ClassVar[type[PhasedMetadataBuilder]]

    @staticmethod
    def get_name() -> str:
        """Return the one name that vLLM leaves to out-of-tree backends."""
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> type[PhasedImpl]:  # type: ignore[override]  # vLLM calls the class's
        """Return the implementation class."""
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> type[PhasedMetadataBuilder]:  # type: ignore[override]
        """Return the metadata builder class."""
        return cls.builder_cls

    @classmethod
    def get_supported_kernel_block_sizes(cls, *spec: Any) -> list[int | MultipleOf]:  # type: ignore[override]
        """Return the block sizes that both take. vLLM 0.33 passes the cache's spec."""
        return common_block_sizes(
            *(backend.get_supported_kernel_block_sizes(*spec) for backend in cls.backends.values())
        )

    @classmethod
    def get_kv_cache_shape(cls, *args: Any, **kwargs: Any) -> tuple[int, ...]:  # type: ignore[override]
        """Return the cache's shape, the same of both. Called up to vLLM 0.28."""
        return cls.backends[PREFILL].get_kv_cache_shape(*args, **kwargs)

    @classmethod
    def get_kv_cache_stride_order(cls, *args: Any, **kwargs: Any) -> tuple[int, ...]:  # type: ignore[override]
        """Return the cache's order in memory, the same of both. Called up to vLLM 0.28."""
        return cls.backends[PREFILL].get_kv_cache_stride_order(*args, **kwargs)

    @classmethod
    def get_required_kv_cache_layout(cls) -> Any:
        """Return the layout that one of them requires, if any. Called up to vLLM 0.28."""
        layouts = [backend.get_required_kv_cache_layout() for backend in cls.backends.values()]
        return next(filter(None, layouts), None)

    @classmethod
    def supports_combination(cls, *args: Any, **kwargs: Any) -> str | None:
        """Return the first reason of either against a combination."""
        reasons = (b.supports_combination(*args, **kwargs) for b in cls.backends.values())
        return next(filter(None, reasons), None)


def phase_of(longest_query: int) -> str:
    """Return the phase of a step whose longest request has so many new tokens."""
    return DECODE if longest_query <= 1 else PREFILL


def disagreement(decode: type[AttentionBackend], prefill: type[AttentionBackend]) -> str:
    """Say why two backends cannot serve a phase each; "" if they can."""
    backends = {DECODE: decode, PREFILL: prefill}
    for phase, backend in backends.items():
        if not issubclass(backend.get_impl_cls(), AttentionImpl):
            return f"that for {phase} ({backend.__name__}) is latent or sparse attention"
    for what, ask in _LAYOUT.items():
        answers = {phase: ask(backend) for phase, backend in backends.items()}
        if answers[DECODE] != answers[PREFILL] and None not in answers.values():
            return (
                f"they lay the cache out in different ways: its {what} is {answers[DECODE]} for "
                f"decode ({decode.__name__}) and {answers[PREFILL]} for prefill "
                f"({prefill.__name__})"
            )
    if not common_block_sizes(*(b.get_supported_kernel_block_sizes() for b in backends.values())):
        return "they have no block size in common"
    return ""


def by_phase(
    decode: type[AttentionBackend], prefill: type[AttentionBackend]
) -> type[PhasedBackend]:
    """Return the backend that serves steps of pure decode with one backend, others with another.

    It is an attribute of this module, so that vLLM can find it by its name.

    Raises:
        ValueError: they do not go together; the message says why.
    """
    problem = disagreement(decode, prefill)
    if problem:
        raise ValueError(
            f"{decode.__name__} and {prefill.__name__} cannot share a model: {problem}."
        )
    backends = {DECODE: decode, PREFILL: prefill}
    name = "".join(f"{phase.capitalize()}{backend.__name__}" for phase, backend in backends.items())
    present: type[PhasedBackend] | None = globals().get(name)
    if present is not None and present.backends == backends:
        return present
    impls = [backend.get_impl_cls() for backend in backends.values()]
    abilities = {
        ability: all(getattr(impl, ability) for impl in impls)
        for ability in dir(AttentionImpl)
        if isinstance(getattr(AttentionImpl, ability), bool)
    }
    content: dict[str, Any] = {
        "__module__": __name__,
        "backends": backends,
        "impl_cls": type(f"{name}Impl", (PhasedImpl,), {**abilities, "backends": backends}),
        "builder_cls": type(
            f"{name}MetadataBuilder", (PhasedMetadataBuilder,), {"backends": backends}
        ),
        # It writes the cache itself only if both do; one that does so anyway writes the same again.
        "forward_includes_kv_cache_update": all(map(_writes_in_forward, backends.values())),
    }
    for answer in dir(AttentionBackend):
        if answer.startswith("supports_") and answer != "supports_combination":
            content[answer] = classmethod(_both(answer))
    made = type(name, (PhasedBackend,), content)
    globals()[name] = made
    return made


def _both(answer: str) -> Any:
    def ask(cls: type[PhasedBackend], *args: Any, **kwargs: Any) -> bool:
        return all(getattr(part, answer)(*args, **kwargs) for part in cls.backends.values())

    return ask


def _writes_in_forward(backend: type[AttentionBackend]) -> bool:
    return bool(backend.forward_includes_kv_cache_update)


def common_block_sizes(
    ours: list[int | MultipleOf], theirs: list[int | MultipleOf]
) -> list[int | MultipleOf]:
    """Return the block sizes that are in both lists, each once; an empty list has every size."""
    every: list[int | MultipleOf] = [MultipleOf(1)]
    found: dict[tuple[type, int], int | MultipleOf] = {}
    for one, other in itertools.product(ours or every, theirs or every):
        size: int | MultipleOf
        if isinstance(one, MultipleOf) and isinstance(other, MultipleOf):
            number = math.lcm(one.base, other.base)
            size = MultipleOf(number)
        else:
            size = number = other if isinstance(one, MultipleOf) else one
            if not (_has(one, number) and _has(other, number)):
                continue
        found[type(size), number] = size
    return list(found.values())


def _has(size: int | MultipleOf, number: int) -> bool:
    return number % size.base == 0 if isinstance(size, MultipleOf) else number == size


def _shape(backend: type[AttentionBackend]) -> str | None:
    """Return the cache's shape in words; None where vLLM decides about it."""
    if not hasattr(backend, "get_kv_cache_shape"):
        return None
    names = {number: name for name, number in _NUMBERS.items()} | {
        2 * _NUMBERS["head_size"]: "2 * head_size"
    }
    shape = backend.get_kv_cache_shape(*_NUMBERS.values())
    return f"({', '.join(names.get(size, str(size)) for size in shape)})"


def _stride_order(backend: type[AttentionBackend]) -> tuple[int, ...] | None:
    """Return the order of the cache's dimensions in memory; None where vLLM decides about it."""
    if not hasattr(backend, "get_kv_cache_stride_order"):
        return None
    try:
        return tuple(backend.get_kv_cache_stride_order())
    except NotImplementedError:  # vLLM then takes the order of the shape
        return tuple(range(len(backend.get_kv_cache_shape(*_NUMBERS.values()))))


def _required(backend: type[AttentionBackend]) -> Any:
    return getattr(backend, "get_required_kv_cache_layout", lambda: None)()


_LAYOUT = {"shape": _shape, "order in memory": _stride_order, "required layout": _required}


class _Changed:
    """An object as another one sees it, with some attributes changed."""

    def __init__(self, seen: Any, **changed: Any) -> None:
        vars(self).update(changed)
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seen, name)


def _seen_in(phase: str, vllm_config: Any) -> Any:
    """Return vLLM's configuration with the phase's implementations in the layers.

    Builders look through the layers for their own implementations, to plan for their windows.
    """
    compilation = vllm_config.compilation_config
    layers = {}
    for name, layer in compilation.static_forward_context.items():
        impl = getattr(layer, "impl", None)
        layers[name] = layer
        if isinstance(impl, PhasedImpl):
            layers[name] = copy.copy(layer)
            layers[name].impl = impl.parts[phase]
    return _Changed(
        vllm_config, compilation_config=_Changed(compilation, static_forward_context=layers)
    )
