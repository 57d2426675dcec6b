"""Stock vLLM on NVIDIA GPUs generates what transformers does on the CPU, whoever's operators run.

In fp32 the tokens are equal: layers are the mode's, attention is plain PyTorch (FlashAttention has
no fp32, and Triton multiplies fp32 in TF32), models run eagerly. In bf16 every operator is the
mode's, models are compiled and run in CUDA graphs, and log-probabilities are compared.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jobs import ENGINE, GREEDY, run_job

nvml = pytest.importorskip("vllm_fl_cuda.nvml")

HERE = Path(__file__).parent
LAYERS = ("silu_and_mul", "rms_norm", "rotary_embedding")
EXPERTS = ("topk_softmax", "fused_experts")
RUNS = {"vendor": "vendor.cuda", "flagos": "default.flagos", "reference": "reference.torch"}
ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # its kernels are downloaded or compiled at run time
CUDA_PLATFORM = "vllm_fl_cuda.platform.CudaPlatformFL"


def gpus() -> int:
    """How many GPUs vLLM sees, by the driver's library: CUDA stays untouched."""
    if not nvml.detect():
        return 0
    import torch

    return torch.cuda.device_count()


pytestmark = pytest.mark.skipif(not nvml.detect(), reason=str(nvml.detect().reason))
two_gpus = pytest.mark.skipif(gpus() < 2, reason="it needs two GPUs")


@pytest.fixture
def mode(tmp_path):
    """Write a configuration in which an operator's order is one token alone; return it as env."""

    def environment(token: str, **orders: str) -> dict[str, str]:
        operators = {op: [token] for op in (*LAYERS, *EXPERTS)}
        operators |= {op: [order] for op, order in orders.items()}
        path = tmp_path / "mode.yaml"
        path.write_text(json.dumps({"prefer": token, "op_backends": operators}))
        return {**ENV, "VLLM_FL_CONFIG": str(path)}

    return environment


@pytest.fixture(scope="module")
def random_prompts():
    draw = random.Random(2)
    return [[draw.randrange(5, 500) for _ in range(n)] for n in (16, 17, 33, 100, 150)]


def tokens(result):
    return [output["tokens"] for output in result["outputs"][0]]


def check_operators(result, operators, implementation):
    """The operators were called, and by this implementation alone."""
    assert result["platform"] == CUDA_PLATFORM
    for worker in result["operators"]:
        for op in operators:
            called = {r["implementation"]: r["calls"] for r in worker if r["op"] == op}
            assert {name for name, calls in called.items() if calls} == {implementation}, op


@pytest.mark.parametrize("token", RUNS)
def test_greedy_tokens(vllm, mode, tiny_model, prompts, expected, token):
    result = vllm(
        tiny_model, prompts, env=mode(token, attention_backend="reference"), enforce_eager=True
    )
    assert tokens(result) == expected
    check_operators(result, LAYERS, RUNS[token])


@two_gpus
@pytest.mark.parametrize("token", ["vendor", "flagos"])
def test_tensor_parallel_over_two_gpus(vllm, mode, tiny_model, prompts, expected, token):
    """The sums over both GPUs come from NCCL, or from vLLM's own all-reduce."""
    result = vllm(
        tiny_model,
        prompts,
        env=mode(token, attention_backend="reference"),
        enforce_eager=True,
        tensor_parallel_size=2,
    )
    assert len(result["operators"]) == 2
    assert tokens(result) == expected
    check_operators(result, LAYERS, RUNS[token])


@pytest.mark.parametrize("token", ["vendor", "flagos"])
def test_tensor_parallel_over_one_gpu(tmp_path, mode, tiny_model, prompts, expected, token):
    """Two ranks sum over NCCL on a GPU that they share.

    NCCL refuses that within a host, so each says it is on a host of its own (NCCL_HOSTID), and they
    talk through sockets.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {
        **mode(token, attention_backend="reference"),
        "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO",
    }  # fmt: skip
    job = {
        "engine": {
            **ENGINE, "model": str(tiny_model), "dtype": "float32", "enforce_eager": True,
            "tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher",
            "disable_custom_all_reduce": True, "gpu_memory_utilization": 0.05,
        },
        "batches": [prompts],
        "sampling": {**GREEDY, "max_tokens": 64},
    }  # fmt: skip

    def run(rank: int):
        folder = tmp_path / f"rank-{rank}"
        folder.mkdir()
        env = {**shared, "RANK": str(rank), "NCCL_HOSTID": f"rank-{rank}"}
        return run_job("run_vllm.py", job, folder, **env)

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(run, range(2)))
    for result in results:
        assert tokens(result) == expected
        check_operators(result, LAYERS, RUNS[token])
    assert "nranks 2" in results[0]["log"]  # of NCCL's communicator


@pytest.mark.parametrize("token", ["vendor", "flagos"])
def test_log_probabilities_compiled(vllm, check_bfloat16, mode, tiny_model, prompts, token):
    longer = [prompt for prompt in prompts if len(prompt) >= 16]
    result = vllm(
        tiny_model, longer, new_tokens=8, env=mode(token, attention_backend=token),
        sampling={"prompt_logprobs": 0}, dtype="bfloat16",
    )  # fmt: skip
    check_bfloat16(tiny_model, longer, result)
    assert result["platform"] == CUDA_PLATFORM
    chosen = {r["op"]: r["implementation"] for r in result["operators"][0] if r["chosen"]}
    assert {chosen[op] for op in (*LAYERS, "attention_backend")} == {RUNS[token]}


@pytest.mark.parametrize("runner", ["0", "1"])  # vLLM's older and newer model runner
def test_attention_by_phase(vllm, tiny_model, prompts, runner):
    """Triton decodes, in whole CUDA graphs, and FlashAttention does the rest."""
    env = {**ENV, "VLLM_USE_V2_MODEL_RUNNER": runner}
    by_phase = "attention_backend.decode=flagos;attention_backend.prefill=vendor"
    sampling = {"logprobs": 0}
    ours, theirs = (
        vllm(tiny_model, prompts, new_tokens=32, env=given, sampling=sampling, dtype="bfloat16")
        for given in ({**env, "VLLM_FL_PER_OP": by_phase}, env)
    )
    chosen = {r["op"]: r["implementation"] for r in ours["operators"][0] if r["chosen"]}
    assert chosen["attention_backend.decode"] == "default.flagos"
    assert chosen["attention_backend.prefill"] == "vendor.cuda"
    for result in (ours, theirs):
        assert re.search(r"Capturing CUDA graphs \((decode, )?FULL\)", result["log"])
    equal = [a == b for a, b in zip(tokens(ours), tokens(theirs), strict=True)]
    assert sum(equal) >= len(equal) // 2
    # Up to where they part, and there, the likeliest tokens are about as likely.
    for mine, native in zip(ours["outputs"][0], theirs["outputs"][0], strict=True):
        steps = zip(
            mine["tokens"], native["tokens"], mine["logprobs"], native["logprobs"], strict=True
        )
        for token, other, logprob, wanted in steps:
            assert abs(logprob - wanted) < 0.25
            if token != other:
                break


@pytest.mark.parametrize("parallel", [1, pytest.param(2, marks=two_gpus)])
@pytest.mark.parametrize("token", ["vendor", "flagos"])
def test_experts(vllm, check_bfloat16, mode, experts_model, random_prompts, token, parallel):
    result = vllm(
        experts_model, random_prompts, new_tokens=8, env=mode(token, attention_backend="vendor"),
        sampling={"prompt_logprobs": 0}, dtype="bfloat16", tensor_parallel_size=parallel,
        enforce_eager=True,
    )  # fmt: skip
    check_bfloat16(experts_model, random_prompts, result, left_out=0.1)
    check_operators(result, EXPERTS, RUNS[token])


def our_kernels() -> set[str]:
    """Return the names of the Triton kernels of vllm-fl-flaggems."""
    from triton.runtime.jit import JITFunction

    package = pytest.importorskip("vllm_fl_flaggems.kernels")
    modules = (
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    )
    kernels = (value for module in modules for value in vars(module).values())
    return {kernel.__name__ for kernel in kernels if isinstance(kernel, JITFunction)}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_no_kernel_of_ours_is_compiled_in_a_request(
    vllm, mode, tiny_model, experts_model, name, eager
):
    """vLLM watches Triton from its own warm-up on, and names each kernel that is compiled late."""
    draw = random.Random(3)
    lengths = ([1], [5, 40], [200] * 3, [7 * n for n in range(1, 41)], [300] * 27)
    batches = [[[draw.randrange(5, 500) for _ in range(n)] for n in batch] for batch in lengths]
    model = experts_model if name == "experts" else tiny_model
    result = vllm(
        model, *batches, new_tokens=4, env=mode("flagos", attention_backend="flagos"),
        dtype="bfloat16", max_num_seqs=64, max_num_batched_tokens=8192, enforce_eager=eager,
    )  # fmt: skip
    check_operators(result, ["reshape_and_cache_flash"], RUNS["flagos"])
    assert "Kernel JIT monitor activated" in result["log"]
    assert re.search(r"Warmed up: attention of [1-9]\d* layers", result["log"])
    late = set(re.findall(r"JIT compilation during inference: (?:\w+\.)*(\w+)", result["log"]))
    assert "_decode_kernel" in our_kernels()
    assert late & our_kernels() == set()


def test_the_defaults_give_what_vllm_gives_alone(vllm, tiny_model, prompts):
    """``cuda.yaml`` leaves every layer to vLLM, and all of attention but decode.

    Both engines run in one process with their client, which hands over all requests before the
    first step: otherwise steps have as many requests as have arrived, and bf16 rounds by that.
    """
    env = {**ENV, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    orders = {"VLLM_FL_PER_OP": "attention_backend=vendor"}
    mine = vllm(tiny_model, prompts, env={**env, **orders}, dtype="bfloat16")
    theirs = vllm(tiny_model, prompts, env={**env, "VLLM_FL_PREFER_ENABLED": "0"}, dtype="bfloat16")
    assert tokens(mine) == tokens(theirs)
    assert not any(row["calls"] for row in mine["operators"][0])
