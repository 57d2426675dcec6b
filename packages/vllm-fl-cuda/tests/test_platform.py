"""The platform class, on vLLM's real CUDA platform with the compiled libraries left out."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# vllm.platforms.cuda loads the compiled operators, which need the driver's libraries. Without them
# the platform can be made, and asked for everything that no GPU answers. What vLLM's layers ask
# about fp8 when they are imported is answered with no. Where vllm-fl-flaggems is installed, too, it
# is not found: its Triton kernels could run on the GPU that is made up here.
BEFORE = """
import json, sys, types
from vllm_fl.dispatch import discovery
scan = discovery.scan
discovery.scan = lambda: [found for found in scan() if found.entry.name != "flaggems"]
for name in ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C"):
    sys.modules[name] = types.ModuleType(name)
import emulated
for name in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8"):
    emulated.declare(lambda *arguments: False, name, key="CompositeExplicitAutograd")
import vllm.platforms
from vllm_fl_cuda.platform import CudaPlatformFL
from vllm.platforms.cuda import CudaPlatform
from vllm.platforms.interface import DeviceCapability
CudaPlatformFL.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
vllm.platforms._current_platform = CudaPlatformFL()
"""


def run(code, **environ):
    done = subprocess.run(
        [sys.executable, "-P", "-c", BEFORE + textwrap.dedent(code)],
        env={
            "OMP_NUM_THREADS": "1",
            "VLLM_FL_PLATFORM": "cuda",
            "PYTHONPATH": str(HERE),
            **environ,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_vllm_sees_its_own_cuda_platform():
    assert run("""
        p = vllm.platforms.current_platform
        print(json.dumps([p.is_cuda(), p.is_out_of_tree(), isinstance(p, CudaPlatform)]))
    """) == [True, False, True]


LAYERS = """
from vllm.config import VllmConfig, set_current_vllm_config
from vllm_fl.integration.plugin import install_layers
install_layers()
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.layernorm import RMSNorm
with set_current_vllm_config(VllmConfig()):
    norm = RMSNorm(8)
method = norm._forward_method.__func__.__qualname__
print(json.dumps([method, norm.name, sorted(op_registry_oot)]))
"""


def test_the_defaults_keep_vllm_s_layers():
    method, name, replaced = run(LAYERS)
    assert method.startswith("RMSNorm.")
    assert name == "rms_norm"
    assert replaced == []


def test_a_dispatched_layer_takes_forward_cuda_and_keeps_its_name():
    found = run(LAYERS, VLLM_FL_OOT_WHITELIST="rms_norm")
    assert found == ["RMSNormFL.forward_cuda", "rms_norm", ["RMSNorm"]]


ALL_LAYERS = {"GeluAndMul", "GemmaRMSNorm", "MoERunner", "RMSNorm", "RotaryEmbedding", "SiluAndMul",
              "UnquantizedFusedMoEMethod"}  # fmt: skip


def test_an_order_takes_its_layer_off_the_defaults_list():
    found = run(LAYERS, VLLM_FL_PER_OP="rms_norm=reference")
    assert found == ["RMSNormFL.forward_cuda", "rms_norm", ["RMSNorm"]]
    held = run(LAYERS, VLLM_FL_PER_OP="rms_norm=reference", VLLM_FL_OOT_BLACKLIST="+rms_norm")
    assert held[2] == []


@pytest.mark.parametrize("kind", ["reference", "flagos", "vendor"])
def test_a_preference_goes_before_the_defaults(kind):
    method, _, replaced = run(LAYERS, VLLM_FL_PREFER=kind)
    assert method == "RMSNormFL.forward_cuda"
    assert set(replaced) >= ALL_LAYERS
    assert run(LAYERS, VLLM_FL_PREFER=kind, VLLM_FL_OOT_ENABLED="0")[2] == []


EXPLAINED = """
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.report import explain
from vllm_fl.integration.custom_ops import decision
found = explain(get_default_manager(), "fused_experts")
print(json.dumps([found["order"], found["source"], decision("fused_experts").reason]))
"""


def test_reasons_name_what_is_in_force():
    order, source, reason = run(EXPLAINED)
    assert order == ["flagos", "vendor", "reference"]
    assert source.endswith("cuda.yaml (platform defaults)")
    assert reason.endswith("cuda.yaml (platform defaults), does not run (it is not installed)")
    assert run(EXPLAINED, VLLM_FL_PREFER="reference") == [
        ["reference", "flagos", "vendor"], "VLLM_FL_PREFER", "",
    ]  # fmt: skip


def test_experts_that_the_operator_lacks_stay_vllm_s_under_a_preference():
    """A preference is no request for one operator, so nothing is refused."""
    asked = """
from vllm_fl.integration.custom_ops import is_asked_for
print(json.dumps(is_asked_for("fused_experts")))
"""
    assert run(asked, VLLM_FL_PREFER="reference") is False
    assert run(asked, VLLM_FL_PER_OP="fused_experts=reference") is True


EXPERTS = """
import pathlib, tempfile
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm_fl.integration.plugin import install_layers
install_layers()
from vllm.model_executor.layers.fused_moe import layer
from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.report import operator_table

torch.manual_seed(0)
config = VllmConfig()
manager = get_default_manager()
manager.count_calls()
with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
    store = pathlib.Path(folder, "store").as_uri()
    init_distributed_environment(1, 0, store, 0, backend="gloo")
    initialize_model_parallel()
    make = getattr(layer, "FusedMoEFactory", None) or layer.FusedMoE  # the name before vLLM 0.28
    runner = make(
        num_experts=8, top_k=2, hidden_size=32, intermediate_size=16, params_dtype=torch.float32,
        renormalize=True, prefix="experts", **{arguments},
    )
    experts = runner.routed_experts
    method = experts.quant_method
    for weight in (experts.w13_weight, experts.w2_weight):
        weight.data.normal_(std=0.2)
    before = experts.w13_weight.data.clone(), experts.w2_weight.data.clone()
    method.process_weights_after_loading(experts)
    if hasattr(runner, "maybe_init_modular_kernel"):  # before vLLM 0.28
        runner.maybe_init_modular_kernel()
    x, logits = torch.randn(5, 32), torch.randn(5, 8)
    with set_forward_context(None, config):
        out = runner._forward_impl(x, logits, None, None)
weights, ids = logits.softmax(-1).topk(2)
weights /= weights.sum(-1, keepdim=True)
expected = torch.zeros_like(x)
for token in range(5):
    for weight, expert in zip(weights[token], ids[token]):
        gate, up = (before[0][expert] @ x[token]).chunk(2)
        expected[token] += weight * (before[1][expert] @ (torch.nn.functional.silu(gate) * up))
torch.testing.assert_close(out, expected)
print(json.dumps({{
    "classes": [type(runner).__name__, type(runner.router).__name__,
                type(experts.quant_method).__name__],
    "kept": [torch.equal(experts.w13_weight, before[0]), torch.equal(experts.w2_weight, before[1])],
    "calls": {{r["op"]: r["implementation"] for r in operator_table(manager) if r["calls"]}},
}}))
"""


def test_experts_run_through_the_operators_on_a_cuda_platform():
    """vLLM has kernels and layouts of its own there; neither must get in between."""
    found = run(
        EXPERTS.format(arguments={}),
        VLLM_FL_OOT_WHITELIST="fused_experts,topk_softmax",
        VLLM_FL_PREFER="reference",
    )
    assert found["classes"] == [
        "MoERunnerFL", "FusedTopKRouterFL", "UnquantizedFusedMoEMethodFL",
    ]  # fmt: skip
    assert found["kept"] == [True, True]
    assert found["calls"] == {
        "topk_softmax": "reference.torch", "fused_experts": "reference.torch",
    }  # fmt: skip


SWITCHES = """
from vllm.config import CompilationConfig, VllmConfig

def switches(*custom_ops):
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=list(custom_ops)))
    again = VllmConfig(compilation_config=config.compilation_config)
    assert again.compilation_config.custom_ops == config.compilation_config.custom_ops
    fusion = config.compilation_config.pass_config.fuse_norm_quant
    return [sorted(config.compilation_config.custom_ops), fusion]

print(json.dumps([switches(), switches("-rms_norm"), switches("all")]))
"""


def test_inductor_does_not_pass_over_dispatched_layers():
    """Nor does it turn fusion passes on that are off without vllm-fl."""
    plain, without, everything = run(SWITCHES, VLLM_FL_OOT_WHITELIST="rms_norm,silu_and_mul")
    assert plain == [["+rms_norm", "+silu_and_mul", "none"], False]
    assert without == [["+silu_and_mul", "-rms_norm", "none"], False]
    assert everything[0] == ["all"]


def test_the_defaults_leave_vllm_s_switches_alone():
    assert run(SWITCHES)[0] == [["none"], False]


# Each: what the user asks for, what the model needs, the policy.
QUESTIONS = {
    "nothing special": (None, {}, {}),
    "no FlashAttention": (None, {"kv_cache_dtype": "fp8"}, {}),
    "latent": (None, {"head_size": 576, "use_mla": True}, {}),
    "latent, strict": (None, {"head_size": 576, "use_mla": True}, {"strict": True}),
    "latent, named": (
        None,
        {"head_size": 576, "use_mla": True},
        {"per_op_order": {"attention_backend": ["vendor:cuda"]}},
    ),
    "named by the user": ("TRITON_ATTN", {}, {}),
    "wrongly named by the user": ("TRITON_ATTN", {"dtype": "int8"}, {}),
    "custom": ("CUSTOM", {}, {}),
    "reference": (None, {}, {"prefer": "reference"}),
    "by phase": (None, {}, {"per_op_order": {"attention_backend.decode": ["reference"]}}),
}
ATTENTION = """
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm_fl.dispatch import SelectionPolicy, set_global_policy
from vllm_fl_cuda.backend import CudaBackend

CudaBackend.is_available = lambda self: True
# FlashAttention looks for its compiled library; here it takes what a Hopper GPU does.
FlashAttentionBackend.validate_configuration = classmethod(
    lambda cls, kv_cache_dtype, **needs: [] if kv_cache_dtype == "auto" else ["no such cache"]
)
{planted}
common = dict(head_size=128, dtype="bfloat16", kv_cache_dtype="auto", block_size=None)
answers = {{}}
with set_current_vllm_config(VllmConfig()):
    for name, (asked, needs, policy) in {questions}.items():
        if policy is not None:  # else the platform's defaults are in force
            set_global_policy(SelectionPolicy.from_dict(**policy))
        needs = {{**common, **needs}}
        needs["dtype"] = getattr(torch, needs["dtype"])
        try:
            answers[name] = CudaPlatformFL.get_attn_backend_cls(
                None if asked is None else AttentionBackendEnum[asked],
                AttentionSelectorConfig(**needs),
            )
        except ValueError as error:
            answers[name] = str(error)
print(json.dumps(answers))
"""
# An implementation as vllm-fl-flaggems has it, its cache laid out as FlashAttention's.
FLAGOS = """
from vllm_fl.dispatch import BackendImplKind, OpImpl, get_default_manager

class FlagosBackend(FlashAttentionBackend):
    pass

def attention_backend(use_mla=False, use_sparse=False):
    return "__main__:FlagosBackend"

get_default_manager().registry.register_impl(
    OpImpl("attention_backend", "default.flagos", BackendImplKind.DEFAULT, attention_backend)
)
"""
BACKENDS = "vllm.v1.attention.backends."
REFERENCE = "vllm_fl_reference.attention.backend.ReferenceAttentionBackend"


def test_who_chooses_the_attention_backend():
    answers = run(ATTENTION.format(questions=QUESTIONS, planted=""))
    assert answers.pop("nothing special") == f"{BACKENDS}flash_attn.FlashAttentionBackend"
    # What no implementation serves is left to vLLM, before plain PyTorch.
    for name in ("latent", "latent, strict"):
        assert answers.pop(name).startswith(f"{BACKENDS}mla."), name
    assert answers.pop("no FlashAttention").startswith(BACKENDS)
    # What the policy or the user names must work.
    named = answers.pop("latent, named")
    assert "vendor.cuda: FlashAttention serves neither latent nor sparse attention" in named
    triton = f"{BACKENDS}triton_attn.TritonAttentionBackend"
    assert answers.pop("named by the user") == triton
    assert answers.pop("wrongly named by the user").startswith("Selected backend")
    assert answers.pop("custom") == REFERENCE
    assert answers.pop("reference") == REFERENCE
    assert answers.pop("by phase") == (  # flagos is not installed, and cuda.yaml is not read
        "vllm_fl.integration.phased_attention."
        "DecodeReferenceAttentionBackendPrefillFlashAttentionBackend"
    )
    assert not answers


def test_the_defaults_decode_with_flagos_and_prefill_with_flash_attention():
    asked = {"the defaults": (None, {}, None)}
    assert run(ATTENTION.format(questions=asked, planted=FLAGOS))["the defaults"] == (
        "vllm_fl.integration.phased_attention.DecodeFlagosBackendPrefillFlashAttentionBackend"
    )


WRAPPED = """
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.models.whisper_causal import (
    create_whisper_attention_backend_with_block_pooling as wrap,
)
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.selector import get_attn_backend
from vllm_fl.integration import caches
from vllm_fl.dispatch import BackendImplKind, OpImpl, get_default_manager
from vllm_fl.integration.handover import KEY
from vllm_fl_cuda.backend import CudaBackend

CudaBackend.is_available = lambda self: True
FlashAttentionBackend.validate_configuration = classmethod(lambda cls, **needs: [])
get_default_manager().registry.register_impl(OpImpl(
    "attention_backend", "default.flagos", BackendImplKind.DEFAULT,
    lambda use_mla=False, use_sparse=False:
        "vllm_fl_reference.attention.backend:ReferenceAttentionBackend",
))
answers = {}
for name in ("VoxtralForConditionalGeneration", "VoxtralRealtimeGeneration"):
    caches.forget()
    config = VllmConfig()
    config.additional_config[KEY]["architectures"] = [name]
    with set_current_vllm_config(config):
        backend = get_attn_backend(64, torch.bfloat16, "auto")
    try:
        answers[name] = wrap(backend, 4).__name__
    except NotImplementedError as error:
        answers[name] = str(error)
print(json.dumps(answers))
"""


def test_vllm_can_wrap_the_class_where_a_model_s_code_does():
    answers = run(WRAPPED)
    assert "PrefillFlashAttentionBackend'> is not yet supported." in answers.pop(
        "VoxtralForConditionalGeneration"
    )  # whose code does not; were it otherwise, the rule could go
    assert answers == {
        "VoxtralRealtimeGeneration": "WhisperCausalAttentionWithBlockPooling_FlashAttentionBackend"
    }
