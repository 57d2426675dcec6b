"""One attention backend for vLLM out of several: each step is served by one of them, its part.

The metadata builder knows the phase of a step, decode or any other, and asks the builder of the
phase's part alone; the layer follows the metadata. Steps of pure decode are whole CUDA graphs, so
that the choice is made when they are captured. All parts read and write one cache, so its layout
must be the same. Which part serves a phase is fixed (:func:`by_phase`), or may change between
steps (:func:`combine`).
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from vllm_fl.dispatch.phases import DECODE, PREFILL

Part: TypeAlias = type[AttentionBackend]
"""A backend that serves steps of another one."""

_NUMBERS = {"num_blocks": 7, "block_size": 64, "num_kv_heads": 3, "head_size": 128}
"""Sizes of a cache to compare layouts by, each another one."""


@dataclass
class PhasedMetadata:
    """One step of one KV cache group.

    Attributes:
        part: whose builder has made the metadata, and whose implementation serves the step.
        metadata: what it has made.
    """

    part: Part
    metadata: Any


class _Parts:
    """What the classes of one combined backend share.

    Attributes:
        serving: phase -> the backends that may serve its steps.
        choose: returns the one that serves the steps of a phase now.
    """

    serving: ClassVar[Mapping[str, tuple[Part, ...]]]
    choose: ClassVar[Callable[[str], Part]]

    @classmethod
    def backends(cls) -> tuple[Part, ...]:
        """Return every part, each once."""
        return tuple(dict.fromkeys(itertools.chain(*cls.serving.values())))

    @classmethod
    def phases_of(cls, part: Part) -> tuple[str, ...]:
        """Return the phases whose steps a part may serve."""
        return tuple(phase for phase, backends in cls.serving.items() if part in backends)


class PhasedImpl(_Parts, AttentionImpl[Any]):
    """One layer's attention: an implementation of each part."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any
    ) -> None:
        """Make all implementations with the arguments of one."""
        self.parts: dict[Part, Any] = {
            backend: backend.get_impl_cls()(num_heads, head_size, scale, *args, **kwargs)
            for backend in self.backends()
        }
        first = next(iter(self.parts.values()))
        # What vLLM reads of an implementation: to describe the layer, and to quantise queries.
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = first.num_kv_heads
        self.kv_cache_dtype = first.kv_cache_dtype
        self.supports_quant_query_input = all(
            part.supports_quant_query_input for part in self.parts.values()
        )
        writers = [b for b in self.parts if not _writes_in_forward(b)]
        if writers:
            self.do_kv_cache_update = self.parts[writers[0]].do_kv_cache_update

    def process_weights_after_loading(self, act_dtype: Any) -> None:
        """Let all prepare what they need."""
        for part in self.parts.values():
            part.process_weights_after_loading(act_dtype)

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
        """Attend with the implementation of the step's part; without a step, with prefill's."""
        if attn_metadata is None:
            part, metadata = self.parts[type(self).choose(PREFILL)], None
        else:
            part, metadata = self.parts[attn_metadata.part], attn_metadata.metadata
        return part.forward(layer, query, key, value, kv_cache, metadata, *args, **kwargs)


class PhasedMetadataBuilder(_Parts, AttentionMetadataBuilder[PhasedMetadata]):
    """Asks the builder of the part that serves the step's phase."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        """Make a builder for each part, which sees the layers as its own implementation's."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.parts: dict[Part, Any] = {
            backend: backend.get_builder_cls()(
                kv_cache_spec, layer_names, _seen_by(backend, vllm_config), device
            )
            for backend in self.backends()
        }
        thresholds = [part.reorder_batch_threshold for part in self.parts.values()]
        self.reorder_batch_threshold = min((t for t in thresholds if t is not None), default=None)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return the least support for steps of decode, and no more than that of uniform steps.

        A graph that serves any step would keep one phase's implementation, whichever the step.
        """

        def least(backends: tuple[Part, ...]) -> AttentionCGSupport:
            builders = (backend.get_builder_cls() for backend in backends)
            levels = (b.get_cudagraph_support(vllm_config, kv_cache_spec) for b in builders)
            return min(levels, key=lambda level: int(level.value))

        # Uniform steps of several tokens a request are prefill's.
        most = AttentionCGSupport.UNIFORM_BATCH
        if least(cls.serving[PREFILL]).value < most.value:
            most = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return min(least(cls.serving[DECODE]), most, key=lambda level: int(level.value))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PhasedMetadata:
        """Return the step's metadata, made by its part's builder."""
        part = self._part_for(common_attn_metadata.max_query_len)
        metadata = self.parts[part].build(common_prefix_len, common_attn_metadata, fast_build)
        return PhasedMetadata(part, metadata)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> PhasedMetadata:
        """Return metadata to capture a step of this form with, made by its part's builder."""
        part = self._part_for(common_attn_metadata.max_query_len)
        metadata = self.parts[part].build_for_cudagraph_capture(common_attn_metadata)
        return PhasedMetadata(part, metadata)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> PhasedMetadata:
        """Return the metadata of a step of a draft model, made by its part's builder."""
        part = self._part_for(common_attn_metadata.max_query_len)
        metadata = self.parts[part].build_for_drafting(common_attn_metadata, draft_index)
        return PhasedMetadata(part, metadata)

    def use_cascade_attention(
        self, common_prefix_len: int, query_lens: Any, *args: Any, **kwargs: Any
    ) -> bool:
        """Return whether the builder of the step's part wants cascade attention."""
        part = self.parts[self._part_for(int(query_lens.max()))]
        return bool(part.use_cascade_attention(common_prefix_len, query_lens, *args, **kwargs))

    def _part_for(self, longest_query: int) -> Part:
        return type(self).choose(phase_of(longest_query))


class PhasedBackend(_Parts, AttentionBackend):
    """What all parts can do. Made by :func:`by_phase` and :func:`combine`."""

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
        """Return the block sizes that all take. vLLM 0.33 passes the cache's spec."""
        return block_sizes_of(cls.backends(), *spec)

    @classmethod
    def get_kv_cache_shape(cls, *args: Any, **kwargs: Any) -> tuple[int, ...]:  # type: ignore[override]
        """Return the cache's shape, the same of all. Called up to vLLM 0.28."""
        return cls.backends()[0].get_kv_cache_shape(*args, **kwargs)

    @classmethod
    def get_kv_cache_stride_order(cls, *args: Any, **kwargs: Any) -> tuple[int, ...]:  # type: ignore[override]
        """Return the cache's order in memory, the same of all. Called up to vLLM 0.28."""
        return cls.backends()[0].get_kv_cache_stride_order(*args, **kwargs)

    @classmethod
    def get_required_kv_cache_layout(cls) -> Any:
        """Return the layout that one of them requires, if any. Called up to vLLM 0.28."""
        layouts = [backend.get_required_kv_cache_layout() for backend in cls.backends()]
        return next(filter(None, layouts), None)

    @classmethod
    def supports_combination(cls, *args: Any, **kwargs: Any) -> str | None:
        """Return the first reason of any part against a combination."""
        reasons = (b.supports_combination(*args, **kwargs) for b in cls.backends())
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
    if not block_sizes_of((decode, prefill)):
        return "they have no block size in common"
    return ""


def by_phase(
    decode: type[AttentionBackend], prefill: type[AttentionBackend]
) -> type[PhasedBackend]:
    """Return the backend that serves steps of pure decode with one backend, others with another.

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
    serving = {phase: (backend,) for phase, backend in backends.items()}
    present: type[PhasedBackend] | None = globals().get(name)
    if present is not None and present.serving == serving:
        return present
    return combine(name, serving, backends.__getitem__)


def combine(
    name: str, serving: Mapping[str, tuple[Part, ...]], choose: Callable[[str], Part]
) -> type[PhasedBackend]:
    """Return a backend out of some that lay the cache out alike.

    It becomes an attribute of this module, so that vLLM can find it by its name.

    Args:
        name: of the class.
        serving: phase -> the backends that may serve its steps.
        choose: asked at each step, on the host, for the one that serves the steps of a phase.
    """
    shared = {"__module__": __name__, "serving": serving, "choose": staticmethod(choose)}
    backends = tuple(dict.fromkeys(itertools.chain(*serving.values())))
    impls = [backend.get_impl_cls() for backend in backends]
    abilities = {
        ability: all(getattr(impl, ability) for impl in impls)
        for ability in dir(AttentionImpl)
        if isinstance(getattr(AttentionImpl, ability), bool)
    }
    content: dict[str, Any] = {
        **shared,
        "impl_cls": type(f"{name}Impl", (PhasedImpl,), {**shared, **abilities}),
        "builder_cls": type(f"{name}MetadataBuilder", (PhasedMetadataBuilder,), shared),
        # It writes the cache itself only if all do; one that does so anyway writes the same again.
        "forward_includes_kv_cache_update": all(map(_writes_in_forward, backends)),
    }
    for answer in dir(AttentionBackend):
        if answer.startswith("supports_") and answer != "supports_combination":
            content[answer] = classmethod(_all(answer))
    made = type(name, (PhasedBackend,), content)
    globals()[name] = made
    return made


def _all(answer: str) -> Any:
    def ask(cls: type[PhasedBackend], *args: Any, **kwargs: Any) -> bool:
        return all(getattr(part, answer)(*args, **kwargs) for part in cls.backends())

    return ask


def _writes_in_forward(backend: type[AttentionBackend]) -> bool:
    return bool(backend.forward_includes_kv_cache_update)


def block_sizes_of(backends: Iterable[Part], *spec: Any) -> list[int | MultipleOf]:
    """Return the block sizes that all backends take, for a cache's spec where vLLM gives it."""
    sizes = (backend.get_supported_kernel_block_sizes(*spec) for backend in backends)
    return functools.reduce(common_block_sizes, sizes)


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


def _seen_by(part: Part, vllm_config: Any) -> Any:
    """Return vLLM's configuration with a part's implementations in the layers.

    Builders look through the layers for their own implementations, to plan for their windows.
    """
    compilation = vllm_config.compilation_config
    layers = {}
    for name, layer in compilation.static_forward_context.items():
        impl = getattr(layer, "impl", None)
        layers[name] = layer
        if isinstance(impl, PhasedImpl) and part in impl.parts:
            layers[name] = copy.copy(layer)
            layers[name].impl = impl.parts[part]
    return _Changed(
        vllm_config, compilation_config=_Changed(compilation, static_forward_context=layers)
    )
