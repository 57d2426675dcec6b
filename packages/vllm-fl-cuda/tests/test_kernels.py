"""The operators on vLLM's kernels, these emulated on the CPU under their real schemas."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import emulated
import pytest
import torch

from vllm_fl.dispatch.discovery import get_discovered_plugins

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def ops():
    """The modules of the operators, vLLM's kernels being emulated."""
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_FL_PLATFORM", "reference")
    emulated.install(patch)
    emulated.emulate_experts(patch)
    yield
    patch.undo()


def rotary_arguments(tokens=5, heads=4, key_heads=2, size=64, dtype=torch.bfloat16):
    qkv = torch.randn(tokens, (heads + 2 * key_heads) * size, dtype=dtype)
    query, key, _ = qkv.split([heads * size, key_heads * size, key_heads * size], dim=-1)
    cos, sin = torch.randn(32, size, dtype=dtype).chunk(2, dim=-1)
    positions = torch.randint(0, 32, (tokens,))
    return [
        query.view(tokens, heads, size),
        key.view(tokens, key_heads, size),
        cos,
        sin,
        positions,
        True,
    ]


def test_the_conformance_kit_passes(tmp_path):
    """Values, strides, guarded memory and tracing, for whatever the predicates let through."""
    done = subprocess.run(
        [
            sys.executable, "-P", "-m", "pytest", "-q", "-c", "/dev/null", f"--rootdir={tmp_path}",
            "-p", "emulated", "-p", "vllm_fl.testing.plugin", "--pyargs", "vllm_fl.testing",
            "--fl-backend=cuda", "--fl-device=cpu", "-k", "not attention_backend",
        ],
        env={"PYTHONPATH": str(HERE), "VLLM_FL_PLATFORM": "reference", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 900


def test_every_operator_of_the_wheel_has_an_emulated_kernel():
    (record,) = [b for b in get_discovered_plugins() if b.name == "cuda"]
    emulations = {
        *emulated.KERNELS,
        *emulated.CACHE_KERNELS,
        *emulated.MOE_KERNELS,
        "fused_experts",
    }
    assert set(record.backend.operators) - {"attention_backend"} <= emulations


def test_the_real_schema_refuses_another_order_of_arguments():
    query, key, cos, sin, positions, neox = rotary_arguments()
    with pytest.raises(RuntimeError, match="rotary_embedding"):
        torch.ops._C.rotary_embedding(positions, query, key, cos, sin, not neox)


def test_rotary_reads_the_halves_of_one_cache_in_place():
    from vllm_fl.integration.rotary_cache import joint_cache
    from vllm_fl_cuda.ops import rotary
    from vllm_fl_reference.ops import rotary as reference

    arguments = rotary_arguments()
    cos = arguments[2]
    assert joint_cache(cos).data_ptr() == cos.data_ptr()
    assert torch.equal(joint_cache(cos), torch.cat(arguments[2:4], dim=-1))
    assert rotary.rotary_embedding_supports(*arguments) is True
    expected = reference.rotary_embedding(*(a.clone() for a in arguments[:2]), *arguments[2:])
    query, key = rotary.rotary_embedding(*arguments)
    assert query is arguments[0]
    assert key is arguments[1]
    for ours, theirs in zip((query, key), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1.6e-2, atol=2e-2)


def with_argument(index, change):
    arguments = rotary_arguments()
    arguments[index] = change(arguments[index])
    return arguments


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (with_argument(2, torch.clone), "two halves of one cache"),
        (with_argument(3, lambda sin: sin + 1), "two halves of one cache"),
        (with_argument(4, lambda positions: positions.int()), "contiguous int64"),
        (with_argument(1, torch.clone), True),
        (with_argument(1, lambda k: k.float()), "dtype or head size"),
        (with_argument(1, lambda k: torch.randn(5, 2, 80).bfloat16()[..., :64]), "between heads"),
        (with_argument(1, lambda k: torch.randn(5, 3, 64).bfloat16()), "no multiple of 3"),
        (rotary_arguments(tokens=0), "no tokens"),
    ],
)
def test_what_rotary_takes(arguments, reason):
    from vllm_fl_cuda.ops.rotary import rotary_embedding_supports

    answer = rotary_embedding_supports(*arguments)
    assert answer is True if reason is True else reason in answer


def cache_arguments(**changed):
    whole = torch.randn(4, 16, 2, 128).bfloat16()
    packed = torch.randn(5, 3 * 128).bfloat16()
    arguments = {
        "key": packed[:, 128:256].view(5, 2, 64),
        "value": packed[:, 256:].view(5, 2, 64),
        "key_cache": whole[..., :64],
        "value_cache": whole[..., 64:],
        "slot_mapping": torch.tensor([3, -1, 63, 0]),
    }
    return [changed[name](x) if name in changed else x for name, x in arguments.items()]


def test_the_cache_write_takes_views_of_one_cache():
    from vllm_fl_cuda.ops.cache import reshape_and_cache_flash, reshape_and_cache_flash_supports

    key, value, key_cache, value_cache, _ = arguments = cache_arguments()
    assert reshape_and_cache_flash_supports(*arguments) is True
    before = key_cache.clone()
    reshape_and_cache_flash(*arguments)
    assert torch.equal(key_cache[0, 3], key[0])
    assert torch.equal(value_cache[3, 15], value[2])
    before[0, 3], before[3, 15], before[0, 0] = key[0], key[2], key[3]
    assert torch.equal(key_cache, before)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"value": lambda x: x[..., :32]}, "differ in shape"),
        ({"key_cache": lambda x: x.half()}, "not torch.bfloat16"),
        ({"value_cache": torch.clone}, "differ in their strides"),
        ({"slot_mapping": lambda x: x.int()}, "contiguous int64"),
        ({"slot_mapping": lambda x: x[:0]}, "no tokens"),
        ({"key": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)}, "not contiguous"),
    ],
)
def test_what_the_cache_write_takes(changed, reason):
    from vllm_fl_cuda.ops.cache import reshape_and_cache_flash_supports

    assert reason in reshape_and_cache_flash_supports(*cache_arguments(**changed))


def test_fused_norm_writes_over_the_donated_arguments():
    from vllm_fl_cuda.ops.norm import rms_norm

    x, residual, weight = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64)
    out, total = rms_norm(x, residual, weight, 1e-6)
    assert out is x
    assert total is residual


def test_tensors_elsewhere_are_declined(monkeypatch):
    from vllm_fl_cuda import layout
    from vllm_fl_cuda.ops import activation, norm, rotary, routing
    from vllm_fl_cuda.ops import experts as mixture

    monkeypatch.setattr(layout, "DEVICE", "cuda")
    x = torch.randn(4, 64)
    assert activation.silu_and_mul_supports(x) == "x is not on a CUDA device"
    assert activation.gelu_and_mul_supports(x, "tanh") == "x is not on a CUDA device"
    assert norm.rms_norm_supports(x, None, x[0], 1e-6) == "x is not on a CUDA device"
    answer = rotary.rotary_embedding_supports(*rotary_arguments())
    assert answer == "the query is not on a CUDA device"
    ids = torch.zeros(2, 2, dtype=torch.int32)
    answers = [
        routing.topk_softmax_supports(*gates()),
        routing.grouped_topk_supports(**groups()),
        mixture.moe_align_block_size_supports(ids, 16, 4),
        mixture.moe_sum_supports(torch.rand(3, 2, 8), torch.rand(3, 8)),
        mixture.fused_experts_supports(**experts()),
    ]
    assert all("not on a CUDA device" in answer for answer in answers)


def gates(tokens=4, experts=8, k=2, dtype=torch.float32):
    return [
        torch.empty(tokens, k), torch.empty(tokens, k, dtype=torch.int32),
        torch.empty(tokens, k, dtype=torch.int32), torch.randn(tokens, experts).to(dtype),
    ]  # fmt: skip


def groups(**changes):
    arguments = {
        "scores": torch.rand(4, 64), "n_group": 8, "topk_group": 4, "topk": 8, "renormalize": True,
        "routed_scaling_factor": 1.0, "bias": torch.zeros(64), "scoring_func": 1,
    }  # fmt: skip
    return {**arguments, **changes}


def experts(dtype=torch.bfloat16, **changes):
    arguments = {
        "hidden_states": torch.randn(3, 16, dtype=dtype),
        "w1": torch.randn(4, 16, 16, dtype=dtype),
        "w2": torch.randn(4, 16, 8, dtype=dtype),
        "topk_weights": torch.rand(3, 2),
        "topk_ids": torch.tensor([[0, 1], [2, 3], [-1, 4]], dtype=torch.int32),
    }
    return {**arguments, **changes}


def test_what_the_kernels_of_experts_take():
    from vllm_fl_cuda.ops import experts as module
    from vllm_fl_cuda.ops import routing

    assert routing.topk_softmax_supports(*gates()) is True
    assert "float64" in routing.topk_softmax_supports(*gates(dtype=torch.float64))
    assert routing.topk_softmax_supports(*gates(tokens=0)) == "there are no tokens"
    narrow = gates()
    narrow[3] = torch.randn(4, 16)[:, :8]
    assert "not contiguous" in routing.topk_softmax_supports(*narrow)
    assert routing.grouped_topk_supports(**groups()) is True
    assert "without a bias" in routing.grouped_topk_supports(**groups(bias=None))
    assert "64 groups" in routing.grouped_topk_supports(**groups(n_group=64))
    many = torch.zeros(2, 2, dtype=torch.int32)
    assert module.moe_align_block_size_supports(many, 16, 992) is True
    assert "993 experts" in module.moe_align_block_size_supports(many, 16, 993)
    assert module.moe_sum_supports(torch.rand(3, 2, 8), torch.rand(3, 8)) is True
    odd = torch.rand(3, 2, 9)[..., :8]
    assert "not contiguous" in module.moe_sum_supports(odd, torch.rand(3, 8))
    assert module.fused_experts_supports(**experts()) is True
    many_experts = module.fused_experts_supports(**experts(), global_num_experts=993)
    assert many_experts == "more than 992 experts"
    apart = torch.randn(3, 32).bfloat16()[:, ::2]
    assert "not contiguous" in module.fused_experts_supports(**experts(hidden_states=apart))


def test_negative_ids_reach_no_kernel():
    """Its counters would be written before their beginning."""
    from vllm_fl_cuda.ops.experts import fused_experts, moe_align_block_size

    ids = torch.tensor([[0, -1], [1, 7]], dtype=torch.int32)
    entries, owners, used = moe_align_block_size(ids, 2, 2)
    assert entries.tolist() == [0, 4, 2, 4, 4, 4]
    assert owners.tolist() == [0, 1, -1]
    assert used.tolist() == [4]
    given = experts()
    out = fused_experts(**given)
    assert out[2].tolist() == [0.0] * 16
    assert torch.equal(
        out[:2], fused_experts(**{k: v if k in ("w1", "w2") else v[:2] for k, v in given.items()})
    )


def test_an_activation_that_the_operator_lacks_is_refused():
    from vllm_fl_cuda.ops.experts import fused_experts

    with pytest.raises(ValueError, match="must be one of silu, gelu, got 'swigluoai'"):
        fused_experts(**experts(), activation="swigluoai")


def test_an_unknown_approximation_is_declined():
    from vllm_fl_cuda.ops.activation import gelu_and_mul_supports

    assert "approximate='fast'" in gelu_and_mul_supports(torch.randn(4, 64), "fast")


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_compiled_calls_keep_the_mutations():
    """The kernels write over their arguments, through views of one packed tensor."""
    from vllm_fl_cuda.ops.rotary import rotary_embedding, rotary_embedding_supports

    def layer(qkv, cache, positions):
        query, key, _ = qkv.split([256, 128, 128], dim=-1)
        arguments = [query.view(-1, 4, 64), key.view(-1, 2, 64), *cache.chunk(2, dim=-1), positions]
        assert rotary_embedding_supports(*arguments, True) is True
        return [x * 1 for x in rotary_embedding(*arguments, True)]

    arguments = (torch.randn(5, 512), torch.randn(32, 64), torch.randint(0, 32, (5,)))
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    results = compiled(arguments[0].clone(), *arguments[1:])
    expected = layer(arguments[0].clone(), *arguments[1:])
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


MODEL = HERE.parents[2] / "examples" / "tiny-qwen3"
GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, compilation = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(
        model=model, dtype="float32", max_model_len=256, max_num_seqs=4, skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 27, compilation_config=compilation,
    )
    llm.collective_rpc("fl_count_calls")
    prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (1, 7, 33)]
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    print("RESULT", json.dumps({
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "calls": {
            f"{row['op']} {row['implementation']}": row["calls"]
            for row in llm.collective_rpc("fl_operator_table")[0]
        },
    }))
"""


def generate(folder, compilation=None, **environ):
    script = folder / "generate.py"
    script.write_text(GENERATE)
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(MODEL), json.dumps(compilation or {})],
        env={
            **os.environ, "PYTHONPATH": str(HERE), "VLLM_FL_PLATFORM": "reference",
            "OMP_NUM_THREADS": "1", "VLLM_CACHE_ROOT": str(folder), **environ,
        },
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return json.loads(result.removeprefix("RESULT"))


def test_a_model_runs_on_the_kernels_eagerly_and_compiled(tmp_path):
    """vLLM's layers call them with what they take, and the tokens are those of plain PyTorch."""
    expected = generate(tmp_path)
    vendor = {
        "VLLM_FL_PLUGIN_MODULES": "emulated",
        "VLLM_FL_PREFER": "vendor",
        "VLLM_FL_PER_OP": "attention_backend=reference",
    }
    eager = generate(tmp_path, **vendor)
    assert eager["tokens"] == expected["tokens"]
    for op in ("silu_and_mul", "rms_norm", "rotary_embedding"):
        assert eager["calls"][f"{op} vendor.cuda"] > 50, op
        assert eager["calls"].get(f"{op} reference.torch", 0) == 0, op
    if shutil.which("g++"):  # for Inductor
        compiled = generate(tmp_path, {"mode": 3, "backend": "inductor"}, **vendor)
        assert compiled["tokens"] == expected["tokens"]
