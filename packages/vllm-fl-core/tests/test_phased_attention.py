"""One attention backend out of several: which of them does what. Nothing is computed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_fl.dispatch import (
    BackendImplKind,
    OpImpl,
    RegistrationError,
    SelectionPolicy,
    set_global_policy,
    state,
)
from vllm_fl.dispatch import config as configuration
from vllm_fl.integration import (
    attention,
    handover,
    live_attention,
    phased_attention,
    tuning,
)
from vllm_fl.integration.attention import NoAttentionBackend, select_backend
from vllm_fl.integration.graphs import NotRebindable
from vllm_fl.integration.phased_attention import (
    PhasedMetadata,
    by_phase,
    combine,
    common_block_sizes,
    disagreement,
)
from vllm_fl.integration.warmup import warm_up_attention

BLOCKS_FIRST = "num_blocks, num_kv_heads, block_size, 2 * head_size"


class OneImpl(AttentionImpl):
    supports_dcp = False

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, **more):
        self.num_kv_heads, self.kv_cache_dtype, self.more = num_kv_heads, "auto", more
        self.supports_quant_query_input = True
        self.calls = []

    def process_weights_after_loading(self, act_dtype):
        self.calls.append(("weights", act_dtype))

    def do_kv_cache_update(self, *args):
        self.calls.append(("write", *args))

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, **scales):
        self.calls.append(("forward", attn_metadata, scales))
        return output


class OtherImpl(OneImpl):
    supports_dcp = True
    can_return_lse_for_decode = True


class OneBuilder(AttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, spec, layer_names, vllm_config, device):
        super().__init__(spec, layer_names, vllm_config, device)
        self.reorder_batch_threshold = None
        layers = vllm_config.compilation_config.static_forward_context
        self.impls = {name: type(layer.impl) for name, layer in layers.items()}

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return (type(self), "build", common_prefix_len, fast_build)

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return (type(self), "capture")

    def build_for_drafting(self, common_attn_metadata, draft_index):
        return (type(self), "draft", draft_index)

    def use_cascade_attention(self, *args, **kwargs):
        return False


class OtherBuilder(OneBuilder):
    def __init__(self, *args):
        super().__init__(*args)
        self.reorder_batch_threshold = 4

    def use_cascade_attention(self, *args, **kwargs):
        return True


class One(AttentionBackend):
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name():
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return OneImpl

    @staticmethod
    def get_builder_cls():
        return OneBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(*spec):
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, dtype="auto"):
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @classmethod
    def supports_sink(cls):
        return True

    @classmethod
    def supports_sliding_window(cls):
        return True


class Other(One):
    @staticmethod
    def get_name():
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls():
        return OtherImpl

    @staticmethod
    def get_builder_cls():
        return OtherBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(*spec):
        return [32, 128]

    @classmethod
    def supports_sink(cls):
        return False

    @classmethod
    def supports_combination(cls, *args, **kwargs):
        return "heads of 256 need blocks of 32" if kwargs.get("head_size") == 256 else None


class TwoFirst(Other):
    """Keys and values apart, as older FlashAttention has them."""

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, dtype="auto"):
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class HeadsFirst(Other):
    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        return (0, 2, 1, 3)


class WritesItself(Other):
    forward_includes_kv_cache_update = True


def step(longest_query):
    return SimpleNamespace(max_query_len=longest_query)


@pytest.fixture
def layer():
    """A layer of One for decode and Other for prefill."""
    backend = by_phase(One, Other)
    return SimpleNamespace(impl=backend.get_impl_cls()(8, 64, 0.5, 2, sinks="s"))


@pytest.fixture
def builder(layer):
    layers = {"mine": layer, "another": SimpleNamespace(impl="its own")}
    config = SimpleNamespace(
        model_config="the model", compilation_config=SimpleNamespace(static_forward_context=layers)
    )
    builder = by_phase(One, Other).get_builder_cls()("spec", ["mine"], config, "cpu")
    assert builder.parts[One].vllm_config.model_config == "the model"
    return builder


@pytest.mark.parametrize(
    ("longest", "backend", "part"),
    [(0, One, OneBuilder), (1, One, OneBuilder), (2, Other, OtherBuilder)],
)
def test_a_step_is_built_by_its_phase_alone(builder, longest, backend, part):
    assert builder.build(0, step(longest)) == PhasedMetadata(backend, (part, "build", 0, False))
    assert builder.build(16, step(longest), fast_build=True).metadata == (part, "build", 16, True)
    assert builder.build_for_cudagraph_capture(step(longest)).metadata == (part, "capture")
    assert builder.build_for_drafting(step(longest), 3).metadata == (part, "draft", 3)


def test_cascade_attention_is_the_phase_s(builder):
    """vLLM names the arguments."""
    for longest, wanted in ((1, False), (5, True)):
        lengths = np.array([1, longest])
        answer = builder.use_cascade_attention(
            common_prefix_len=512, query_lens=lengths, num_query_heads=8
        )
        assert answer is wanted


def test_the_batch_is_reordered_as_either_wants(builder):
    assert builder.reorder_batch_threshold == 4


def test_a_builder_sees_its_own_implementations(builder):
    assert builder.parts[One].impls == {"mine": OneImpl, "another": str}
    assert builder.parts[Other].impls == {"mine": OtherImpl, "another": str}


@pytest.mark.parametrize(
    ("decode", "prefill", "both"),
    [
        ("ALWAYS", "ALWAYS", "UNIFORM_BATCH"),
        ("ALWAYS", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("ALWAYS", "NEVER", "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("UNIFORM_SINGLE_TOKEN_DECODE", "ALWAYS", "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("NEVER", "ALWAYS", "NEVER"),
    ],
)
def test_graphs_of_decode_are_decode_s(monkeypatch, decode, prefill, both):
    monkeypatch.setattr(OneBuilder, "_cudagraph_support", AttentionCGSupport[decode])
    monkeypatch.setattr(OtherBuilder, "_cudagraph_support", AttentionCGSupport[prefill])
    answer = by_phase(One, Other).get_builder_cls().get_cudagraph_support(None, None)
    assert answer is AttentionCGSupport[both]


def test_a_layer_follows_the_step(layer):
    decode, prefill = layer.impl.parts[One], layer.impl.parts[Other]
    assert (type(decode), type(prefill)) == (OneImpl, OtherImpl)
    assert decode.more == prefill.more == {"sinks": "s"}
    arguments = (layer, "q", "k", "v", "cache")
    for metadata in (PhasedMetadata(One, 1), PhasedMetadata(Other, 2), None):
        assert layer.impl.forward(*arguments, metadata, "out", output_scale=None) == "out"
    assert decode.calls == [("forward", 1, {"output_scale": None})]
    assert prefill.calls == [
        ("forward", 2, {"output_scale": None}), ("forward", None, {"output_scale": None})
    ]  # fmt: skip
    layer.impl.process_weights_after_loading(torch.float16)
    assert decode.calls[-1] == prefill.calls[-1] == ("weights", torch.float16)


def test_a_part_warms_up_for_its_phase(layer):
    layer.kv_cache = torch.zeros(3)
    layers = {"mine": layer}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert warm_up_attention(config) == 0  # neither can
    decode, prefill = layer.impl.parts[One], layer.impl.parts[Other]
    decode.warm_up = lambda *given: decode.calls.append(given)
    assert warm_up_attention(config) == 1
    assert decode.calls == [(layer.kv_cache, config, ("decode",))]
    prefill.warm_up = lambda *given: 1 / 0
    assert warm_up_attention(config) == 1  # by decode's, whatever happens to the other
    del decode.warm_up
    assert warm_up_attention(config) == 0
    prefill.warm_up = lambda kv_cache, vllm_config: None
    with pytest.raises(
        RegistrationError, match=r"OtherImpl: .* Wanted: warm_up\(self, kv_cache, v"
    ):
        warm_up_attention(config)


def test_what_vllm_reads_of_an_implementation(layer):
    impl = layer.impl
    assert (impl.num_heads, impl.head_size, impl.scale, impl.num_kv_heads) == (8, 64, 0.5, 2)
    assert impl.kv_cache_dtype == "auto"
    assert impl.supports_quant_query_input
    assert not impl.supports_dcp  # one does not


@pytest.mark.parametrize(
    ("backends", "writer"),
    [((One, Other), One), ((One, WritesItself), One), ((WritesItself, One), One)],
)
def test_the_cache_is_written_once_by_who_leaves_it_to_vllm(backends, writer):
    backend = by_phase(*backends)
    assert backend.forward_includes_kv_cache_update is False
    impl = backend.get_impl_cls()(8, 64, 0.5, 2)
    impl.do_kv_cache_update("layer", "k", "v", "cache", "slots")
    called = {backend: [c[0] for c in part.calls] for backend, part in impl.parts.items()}
    assert called.pop(writer) == ["write"]
    assert list(called.values()) == [[]]


def test_the_cache_is_written_by_forward_if_both_do():
    backend = by_phase(WritesItself, type("Another", (WritesItself,), {}))
    assert backend.forward_includes_kv_cache_update is True
    assert not hasattr(backend.get_impl_cls()(8, 64, 0.5, 2), "do_kv_cache_update")


def test_it_supports_what_both_do():
    backend = by_phase(One, Other)
    assert backend.get_name() == "CUSTOM"
    assert backend.supports_sliding_window()
    assert not backend.supports_sink()
    assert not backend.supports_alibi_sqrt()
    assert [size.base if isinstance(size, MultipleOf) else size
            for size in backend.get_supported_kernel_block_sizes()] == [32, 128]  # fmt: skip
    assert backend.get_kv_cache_shape(5, 32, 2, 64) == (5, 2, 32, 128)
    assert backend.supports_block_size(32)
    assert not backend.supports_block_size(16)
    rest = dict.fromkeys(
        ("dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse",
         "use_mm_prefix", "device_capability")
    )  # fmt: skip
    refusal = "heads of 256 need blocks of 32"
    assert backend.supports_combination(head_size=256, **rest) == refusal
    assert backend.supports_combination(head_size=64, **rest) is None
    assert backend.full_cls_name() == (phased_attention.__name__, "DecodeOnePrefillOther")
    assert phased_attention.DecodeOnePrefillOther is backend
    assert by_phase(One, Other) is backend
    assert backend.backends() == (One, Other)
    assert (backend.phases_of(One), backend.phases_of(Other)) == (("decode",), ("prefill",))


def test_parts_that_serve_several_phases_are_made_once():
    backends = {"decode": One, "prefill": Other}
    backend = combine("Changing", dict.fromkeys(backends, (One, Other)), backends.__getitem__)
    impl = backend.get_impl_cls()(8, 64, 0.5, 2)
    assert list(impl.parts) == [One, Other]
    assert impl.phases_of(Other) == ("decode", "prefill")
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    builder = backend.get_builder_cls()("spec", [], config, "cpu")
    impl.forward("layer", "q", "k", "v", "cache", before := builder.build(0, step(1)), "out")
    backends.update(decode=Other, prefill=One)
    impl.forward("layer", "q", "k", "v", "cache", after := builder.build(0, step(1)), "out")
    assert (before.part, after.part) == (One, Other)
    assert builder.build_for_cudagraph_capture(step(1)).metadata == (OtherBuilder, "capture")
    impl.forward("layer", "q", "k", "v", "cache", None, "out")  # prefill's: One
    assert [call[1] for call in impl.parts[One].calls] == [before.metadata, None]
    assert [call[1] for call in impl.parts[Other].calls] == [after.metadata]


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ("ALWAYS", "ALWAYS", "UNIFORM_BATCH"),
        ("UNIFORM_BATCH", "ALWAYS", "UNIFORM_BATCH"),
        ("ALWAYS", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("NEVER", "ALWAYS", "NEVER"),
        ("ALWAYS", "NEVER", "NEVER"),
    ],
)
def test_graphs_are_those_that_each_part_can_have(monkeypatch, one, other, both):
    monkeypatch.setattr(OneBuilder, "_cudagraph_support", AttentionCGSupport[one])
    monkeypatch.setattr(OtherBuilder, "_cudagraph_support", AttentionCGSupport[other])
    backend = combine("Both", dict.fromkeys(("decode", "prefill"), (One, Other)), {}.get)
    assert backend.get_builder_cls().get_cudagraph_support(None, None) is AttentionCGSupport[both]


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ([MultipleOf(16)], [MultipleOf(24)], ["48n"]),
        ([MultipleOf(16)], [64, 40], ["64"]),
        ([16, 32], [32, 64], ["32"]),
        ([16], [32], []),
        ([], [MultipleOf(8)], ["8n"]),
        ([], [], ["1n"]),
    ],
)
def test_block_sizes_in_common(one, other, both):
    for first, second in ((one, other), (other, one)):
        found = common_block_sizes(first, second)
        assert [f"{s.base}n" if isinstance(s, MultipleOf) else str(s) for s in found] == both


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (TwoFirst, f"its shape is ({BLOCKS_FIRST}) for decode (One) and (2, num_blocks, "
                   "block_size, num_kv_heads, head_size) for prefill (TwoFirst)"),
        (HeadsFirst, "its order in memory is (0, 1, 2, 3) for decode (One) and (0, 2, 1, 3)"),
    ],
)  # fmt: skip
def test_layouts_must_agree(other, message):
    assert message in disagreement(One, other)
    with pytest.raises(ValueError, match=f"One and {other.__name__} cannot share a model: they"):
        by_phase(One, other)


def test_block_sizes_must_overlap(monkeypatch):
    monkeypatch.setattr(Other, "get_supported_kernel_block_sizes", staticmethod(lambda: [8]))
    assert disagreement(One, Other) == "they have no block size in common"


# -- selection


class Platform:
    device_name = "acme"
    vllm_has_attention = False

    @staticmethod
    def get_device_capability():
        return None


@pytest.fixture
def choose(manager, monkeypatch):
    """Register implementations; select among them for a model."""
    for module in (attention, handover, live_attention, tuning):
        monkeypatch.setattr(module, "get_default_manager", lambda: manager)

    def register(impl_id, backend):
        kind = {"default": "flagos"}.get(impl_id.split(".")[0], impl_id.split(".")[0])

        def fn(use_mla=False, use_sparse=False):
            return f"{__name__}:{backend.__name__}"

        manager.registry.register_impl(
            OpImpl("attention_backend", impl_id, BackendImplKind(kind), fn,
                   vendor=impl_id.split(".")[1] if kind == "vendor" else None)
        )  # fmt: skip

    def run(implementations, order, selected=None, live=False, parallel=None, model="", **needs):
        manager.registry.clear()
        for impl_id, backend in implementations.items():
            register(impl_id, backend)
        set_global_policy(SelectionPolicy.from_dict(per_op_order={"attention_backend": order}))
        config = AttentionSelectorConfig(
            **{"head_size": 64, "dtype": torch.float16, "kv_cache_dtype": "auto",
               "block_size": None, **needs}
        )  # fmt: skip
        additional = {"vllm_fl": {"live_attention": live}} if live else {}
        run.vllm_config = vllm_config = VllmConfig(additional_config=additional)
        for name, value in (parallel or {}).items():
            setattr(vllm_config.parallel_config, name, value)
        vllm_config.additional_config["vllm_fl"]["architectures"] = [model]
        with set_current_vllm_config(vllm_config):
            return select_backend(Platform, selected, config)

    return run


APART = {"decode": ["flagos"], "prefill": ["vendor"]}


def test_two_are_selected(choose, log):
    path = choose({"default.flagos": One, "vendor.acme": Other}, APART)
    assert path == "vllm_fl.integration.phased_attention.DecodeOnePrefillOther"
    said = [record.getMessage() for record in log]
    assert f"Attention backend for decode: {__name__}.One (default.flagos, by hand)" in said
    assert f"Attention backend for prefill: {__name__}.Other (vendor.acme, by hand)" in said
    assert handover.operator_versions() == {
        "attention_backend.decode": "default.flagos",
        "attention_backend.prefill": "vendor.acme",
    }
    assert tuning.chosen() == {"attention_backend": "decode:default.flagos+prefill:vendor.acme"}


def test_two_that_are_one_are_left_as_they_are(choose):
    order = {"decode": ["flagos"], "prefill": ["flagos"]}
    assert choose({"default.flagos": One}, order) == f"{__name__}.One"


def test_what_one_refuses_falls_to_the_other(choose, log):
    """Named orders have the other one second: then all is the other's."""
    order = {"decode": ["flagos"], "prefill": ["vendor", "flagos"]}
    assert choose({"default.flagos": One, "vendor.acme": TwoFirst}, order) == f"{__name__}.One"
    (warning,) = [r.getMessage() for r in log if r.levelname == "WARNING"]
    assert warning.startswith(
        "decode:default.flagos+prefill:vendor.acme is not used: they lay the cache out in "
    )
    path = choose({"default.flagos": One, "vendor.acme": Other}, order, has_sink=True)
    assert path == f"{__name__}.One"
    key = choose.vllm_config.additional_config["vllm_fl"]["operators"]
    assert key["attention_backend.prefill"] == "default.flagos"  # not what the order begins with


def test_what_is_named_must_go_together(choose):
    with pytest.raises(NoAttentionBackend) as refusal:
        choose({"default.flagos": One, "vendor.acme": TwoFirst}, APART)
    assert f"its shape is ({BLOCKS_FIRST}) for decode (One)" in str(refusal.value)
    with pytest.raises(NoAttentionBackend, match=r"vendor.acme .*attention sinks not supported"):
        choose({"default.flagos": One, "vendor.acme": Other}, APART, has_sink=True)
    assert attention.is_user_s_order()


DCP = {"decode_context_parallel_size": 2}


def test_what_has_no_context_parallelism_is_not_selected(choose):
    """vLLM itself would ask when the layers are built, where nothing else can be chosen."""
    both = {"default.flagos": One, "vendor.acme": Other}
    assert choose(both, ["flagos", "vendor"]) == f"{__name__}.One"
    assert choose(both, ["flagos", "vendor"], parallel=DCP) == f"{__name__}.Other"
    order = {"decode": ["flagos", "vendor"], "prefill": ["vendor"]}
    assert choose(both, order, parallel=DCP) == f"{__name__}.Other"
    with pytest.raises(NoAttentionBackend) as refusal:
        choose(both, APART, parallel=DCP)
    assert (
        f"default.flagos (CUSTOM, {__name__}:One): decode_context_parallel_size=2 not supported\n"
    ) in str(refusal.value)
    live = choose(both, ["vendor"], parallel=DCP, live=True)
    assert live == f"{__name__}.Other"


def test_an_implementation_that_returns_no_lse_has_no_context_parallelism(choose, monkeypatch):
    monkeypatch.setattr(OtherImpl, "can_return_lse_for_decode", False)
    with pytest.raises(NoAttentionBackend, match="decode_context_parallel_size=2 not supported"):
        choose({"vendor.acme": Other}, ["vendor"], parallel=DCP)


def test_a_model_that_wraps_vllm_s_classes_gets_one(choose, log, monkeypatch):
    model = "VoxtralRealtimeGeneration"
    both = {"default.flagos": One, "vendor.acme": Other}
    assert choose(both, ["flagos", "vendor"], model="Voxtral") == f"{__name__}.One"
    with pytest.raises(NoAttentionBackend) as refusal:
        choose(both, ["flagos", "vendor"], model=model)
    why = f"{model} takes vLLM's own attention backends alone"
    assert f"vendor.acme (FLASH_ATTN, {__name__}:Other): {why}\n" in str(refusal.value)
    vllm_s = type("VllmS", (Other,), {"__module__": "vllm.v1.attention.backends.acme"})
    monkeypatch.setitem(globals(), "Ours", type("Ours", (vllm_s,), {"__module__": __name__}))
    both["vendor.acme"] = globals()["Ours"]
    order = {"decode": ["flagos", "vendor"], "prefill": ["vendor"]}
    log.clear()
    assert choose(both, order, model=model) == f"{__name__}.Ours"
    said = [record.getMessage() for record in log]
    assert said.count(f"Attention is not by default.flagos: {why}") == 1
    # Not a class made of two of them, either.
    monkeypatch.setitem(globals(), "Second", type("Second", (vllm_s,), {"__module__": __name__}))
    both["vendor.second"] = globals()["Second"]
    order = {"decode": ["vendor:acme"], "prefill": ["vendor:second", "vendor:acme"]}
    assert choose(both, order, model=model) == f"{__name__}.Ours"
    assert choose(both, ["vendor:second"], model=model, live=True) == f"{__name__}.Second"


def test_what_the_platform_s_defaults_name_is_no_user_s(choose, tmp_path, monkeypatch):
    """So that vLLM may select where they refuse a model."""
    orders = {"attention_backend.decode": ["flagos"]}
    set_global_policy(SelectionPolicy.from_dict(per_op_order=orders))
    assert attention.is_user_s_order()
    package = tmp_path / "acme_fl"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "acme.yaml").write_text("op_backends: {attention_backend: {decode: [flagos]}}")
    monkeypatch.syspath_prepend(tmp_path)

    def settings():
        return configuration.load("acme_fl:acme.yaml")

    monkeypatch.setattr(attention, "current_config", settings)
    assert not attention.is_user_s_order()
    orders["attention_backend.prefill"] = ["vendor"]
    set_global_policy(SelectionPolicy.from_dict(per_op_order=orders))
    assert attention.is_user_s_order()
    monkeypatch.setenv("VLLM_FL_PER_OP", "attention_backend.decode=flagos")
    set_global_policy(settings().policy())
    assert attention.is_user_s_order()


def test_pairs_for_the_tuner(choose):
    implementations = {
        "default.flagos": One, "vendor.acme": Other, "vendor.odd": TwoFirst, "reference.torch": One,
    }  # fmt: skip
    worker = tuning.TuningMethods()
    worker.vllm_config = VllmConfig()
    choose(implementations, ["flagos"])
    candidates = worker.fl_candidates()["attention_backend"]
    assert candidates["live"] == []
    assert candidates["available"] == [
        "default.flagos", "vendor.acme", "vendor.odd", "reference.torch",
        "decode:default.flagos+prefill:vendor.acme", "decode:vendor.acme+prefill:default.flagos",
    ]  # fmt: skip
    choose(implementations, {"decode": ["vendor:acme"], "prefill": ["flagos"]})
    candidates = worker.fl_candidates()["attention_backend"]
    assert candidates["available"][0] == "decode:vendor.acme+prefill:default.flagos"


# -- the tuner's engine


LIVE = {
    "default.flagos": One, "vendor.acme": Other, "vendor.itself": WritesItself,
    "vendor.odd": TwoFirst, "reference.torch": One,
}  # fmt: skip


@pytest.fixture
def worker(choose):
    """Build a layer with what is chosen; return a worker that has it."""

    def build(order, implementations=LIVE, live=True, **needs):
        path = choose(implementations, order, live=live, **needs)
        backend = getattr(phased_attention, path.rpartition(".")[2], None) or globals()["One"]
        layer = SimpleNamespace(attn_backend=backend, impl=backend.get_impl_cls()(8, 64, 0.5, 2))
        worker = tuning.TuningMethods()
        worker.vllm_config = VllmConfig()
        worker.vllm_config.compilation_config.static_forward_context["mine"] = layer
        worker.model_runner = SimpleNamespace(
            cudagraph_manager=SimpleNamespace(graphs={}), layer=layer, backend=backend
        )
        return worker

    return build


def serving(worker):
    """Return which parts serve decode and prefill."""
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    builder = worker.model_runner.backend.get_builder_cls()("spec", [], config, "cpu")
    return tuple(builder.build(0, step(longest)).part for longest in (1, 2))


def set_orders(worker, orders, **policy):
    content = {"strict": True, "per_op_order": {"attention_backend": orders}, **policy}
    return worker.fl_set_policy(content)["bound"]["attention_backend"]


def test_what_serves_is_chosen_anew_while_the_engine_lives(worker, log):
    live = worker(["flagos"])
    assert live.model_runner.backend.backends() == (One, Other, WritesItself)
    assert serving(live) == (One, One)
    said = [record.getMessage() for record in log]
    assert "Attention backend: " + f"{__name__}.One (default.flagos, by hand)" in said
    pair = {"decode": ["vendor:acme"], "prefill": ["flagos"]}
    assert set_orders(live, pair) == "decode:vendor.acme+prefill:default.flagos"
    assert serving(live) == (Other, One)
    assert handover.operator_versions() == {
        "attention_backend.decode": "vendor.acme", "attention_backend.prefill": "default.flagos"
    }  # fmt: skip
    assert set_orders(live, ["vendor:itself", "flagos"]) == "vendor.itself"
    assert serving(live) == (WritesItself, WritesItself)
    part = live.model_runner.layer.impl.parts[WritesItself]
    live.model_runner.layer.impl.forward("layer", "q", "k", "v", "cache", None, "out")
    assert part.calls == [("forward", None, {})]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (["vendor:odd", "flagos"], "chooses vendor.odd for the attention of decode, and this "
         "engine's model was built with vendor.acme, default.flagos, vendor.itself: they lay the"),
        ({"decode": ["flagos"], "prefill": ["reference"]}, "chooses reference.torch for the "
         "attention of prefill, .*: plain PyTorch is what others are compared with"),
        (["vendor:nobody"], "chooses none for the attention of decode, .*: it cannot run here"),
    ],
)  # fmt: skip
def test_what_is_not_among_the_parts_is_refused_and_nothing_changes(worker, order, message):
    live = worker(["vendor:acme"])
    before = state.get_global_policy()
    with pytest.raises(NotRebindable, match=message):
        set_orders(live, order)
    assert serving(live) == (Other, Other)
    assert state.get_global_policy() == before


def test_what_refuses_the_model_is_not_among_the_parts(worker):
    """It comes first in an order that is not strict: then the next one serves, and is reported."""
    live = worker(["vendor:acme", "flagos"], has_sink=True)
    assert live.model_runner.backend.__name__ == "One"  # the others refuse, too
    both = {name: LIVE[name] for name in ("default.flagos", "vendor.acme")}
    both["vendor.second"] = type("Second", (One,), {})
    globals()["Second"] = both["vendor.second"]
    live = worker(["vendor:acme", "flagos"], both, has_sink=True)
    candidates = live.fl_candidates()["attention_backend"]
    assert candidates["available"][0] == "default.flagos"
    assert candidates["serves"]
    assert candidates["unable"]["vendor.acme"] == "attention sinks not supported"
    assert candidates["live"] == [
        "default.flagos", "vendor.second", "decode:default.flagos+prefill:vendor.second",
        "decode:vendor.second+prefill:default.flagos",
    ]  # fmt: skip
    with pytest.raises(NotRebindable, match=r"vendor.acme for .*attention sinks not supported"):
        set_orders(live, ["vendor:acme", "flagos"])


def test_what_serves_in_place_of_the_first_choice_is_the_default(worker):
    """Also where it cannot be chosen anew, as plain PyTorch cannot."""
    both = {"default.flagos": Other, "reference.torch": One}
    engine = worker(["flagos", "reference"], both, has_sink=True)
    assert engine.model_runner.backend.__name__ == "One"
    candidates = engine.fl_candidates()["attention_backend"]
    assert candidates["available"][:2] == ["reference.torch", "default.flagos"]
    assert (candidates["live"], candidates["serves"]) == ([], True)
    assert candidates["unable"] == {"default.flagos": "attention sinks not supported"}


def test_live_choices_for_the_tuner(worker):
    candidates = worker(["vendor:odd"]).fl_candidates()["attention_backend"]
    assert candidates["live"] == []  # nobody else has its layout
    live = worker({"decode": ["vendor:acme"], "prefill": ["flagos"]})
    assert serving(live) == (Other, One)
    candidates = live.fl_candidates()["attention_backend"]
    assert candidates["available"][0] == "decode:vendor.acme+prefill:default.flagos"
    assert candidates["live"] == [c for c in candidates["available"]
                                  if "odd" not in c and "reference" not in c]  # fmt: skip
    assert len(candidates["live"]) == 9


def test_engines_that_serve_are_as_ever(worker, choose):
    serves = worker(["flagos"], live=False)
    assert serves.model_runner.backend is One
    assert choose(LIVE, APART, live=False).endswith(".DecodeOnePrefillOther")
    assert choose(LIVE, ["reference"], live=True) == f"{__name__}.One"  # plain PyTorch is alone
