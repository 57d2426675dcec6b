"""The platform and the ledger of the worker; no NPU answers, so only what needs none is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machine import HERE, make_machine

from vllm_fl_ascend import ledger

TINY_MODEL = HERE.parents[2] / "examples" / "tiny-qwen3"
ASK = """
import json, os
import torch
import machine
from pathlib import Path
from vllm_fl_ascend import installation
torch.utils.rename_privateuse1_backend("npu")  # as the real torch_npu does; there is no device
installation.ROOT = Path(os.environ[machine.ROOT_VARIABLE])
from vllm.platforms import current_platform as p
from vllm.config import CompilationConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm_fl_ascend.worker import AscendModelRunnerFL, AscendWorkerFL

def config(**settings):
    model = ModelConfig(model=os.environ["MODEL"], skip_tokenizer_init=True, dtype="bfloat16",
                        **settings.pop("model", {}))
    return VllmConfig(model_config=model, **settings)

def refusal(**settings):
    try:
        config(**settings)
    except Exception as error:
        return str(error)

plain = config()

def attention(**needs):
    common = dict(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None)
    with set_current_vllm_config(plain):
        try:
            return p.get_attn_backend_cls(None, AttentionSelectorConfig(**{**common, **needs}))
        except ValueError as error:
            return str(error)

worker = AscendWorkerFL.__new__(AscendWorkerFL)
with worker._maybe_get_memory_pool_context("weights") as pool:
    pass
print(json.dumps({
    "platform": [
        type(p).__name__, p.is_out_of_tree(), p.device_type, p.dist_backend,
        p.device_control_env_var, p.get_device_capability(), plain.device_config.device_type,
    ],
    "configuration": [
        str(plain.compilation_config.mode), str(plain.compilation_config.cudagraph_mode),
        plain.parallel_config.worker_cls, plain.compilation_config.custom_ops,
        plain.additional_config["vllm_fl"]["operators"]["rms_norm"].split()[0],
    ],
    "graph": refusal(compilation_config=CompilationConfig(mode=0, cudagraph_mode="FULL")),
    "compiled": refusal(compilation_config=CompilationConfig(mode=3)),
    "quantised": refusal(model={"quantization": "fp8"}),
    "speculative": refusal(speculative_config={"method": "ngram", "num_speculative_tokens": 2,
                                               "prompt_lookup_max": 3}),
    "attention": attention(),
    "small heads": attention(head_size=80),
    "latent": attention(head_size=576, use_mla=True),
    "bases": [c.__mro__[1].__module__ for c in (AscendWorkerFL, AscendModelRunnerFL)],
    "pool": pool,
}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What vLLM's objects say in a process on a machine with NPUs."""
    machine = make_machine(tmp_path_factory.mktemp("machine"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", ASK],
        env={
            **os.environ, **machine, "OMP_NUM_THREADS": "1", "VLLM_FL_PLATFORM": "ascend",
            "MODEL": str(TINY_MODEL),
        },
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_vllm_sees_and_how_it_configures_itself(answers):
    assert answers["platform"] == [
        "AscendPlatformFL", True, "npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES", None, "npu",
    ]  # fmt: skip
    assert answers["configuration"] == [
        "0", "NONE", "vllm_fl_ascend.worker.AscendWorkerFL", ["all"], "vendor.ascend",
    ]  # fmt: skip


def test_what_does_not_run_is_refused_with_the_reason(answers):
    graph = "attention takes lengths as numbers on the host, which a graph would freeze"
    assert graph in answers["graph"]
    assert "is not supported on an NPU: models run eagerly" in answers["compiled"]
    assert "fp8 quantization is currently not supported in npu" in answers["quantised"]
    assert "vLLM's rejection sampler consists of Triton kernels" in answers["speculative"]


def test_the_attention_backend_and_what_goes_elsewhere(answers):
    assert answers["attention"] == "vllm_fl_ascend.attention.backend.AscendAttentionBackend"
    reference = "vllm_fl_reference.attention.backend.ReferenceAttentionBackend"
    assert answers["small heads"] == reference
    assert "serves neither latent nor sparse attention" in answers["latent"]


def test_the_worker_and_its_runner_are_vllm_s(answers):
    assert answers["bases"] == ["vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner"]
    assert answers["pool"] is None


class Event:
    def __init__(self, enable_timing=False):
        self.enable_timing = enable_timing


NPU = SimpleNamespace(
    Event=Event,
    **{name: f"npu.{name}" for name in (*ledger.STREAMS, *ledger.MEMORY.values())},
)


def test_every_patch_has_a_reason_an_end_and_a_target():
    entries = list(ledger.patches(NPU))
    assert len({entry.target for entry in entries}) == len(entries)
    for entry in entries:
        assert entry.why.endswith(".")
        assert entry.until.endswith(".")
        module, _, attribute = entry.target.partition(":")
        owner = pytest.importorskip(module)
        # Some versions of torch or vLLM do not have what others need rebound.
        if not entry.target.startswith(("torch.accelerator:", "vllm.v1.worker.block")):
            assert hasattr(owner, attribute)
        if hasattr(owner, attribute):
            assert entry.is_needed(), f"vLLM no longer needs the patch of {entry.target}: remove it"


def test_streams_and_memory_are_the_npu_s(monkeypatch):
    for entry in ledger.patches(NPU):
        module, _, attribute = entry.target.partition(":")
        if hasattr(pytest.importorskip(module), attribute):
            monkeypatch.setattr(f"{module}.{attribute}", entry.replacement)
    assert torch.cuda.current_stream == "npu.current_stream"
    assert torch.accelerator.memory_stats == "npu.memory_stats"
    assert torch.cuda.Event(blocking=True, enable_timing=True).enable_timing is True


requests = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), min_size=1, max_size=5)


@given(requests, st.integers(0, 4), st.sampled_from([1, 4, 16]))
def test_slots_of_tokens(sizes, padding, block_size):
    columns = 36 // block_size + 1
    random = torch.Generator().manual_seed(len(sizes))
    table = torch.randperm(len(sizes) * columns, generator=random).view(-1, columns).int()
    counts = [new for new, _ in sizes]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    positions = [p for new, context in sizes for p in range(context, context + new)]
    expected = [
        int(table[row, p // block_size]) * block_size + p % block_size
        for row, (new, context) in enumerate(sizes)
        for p in range(context, context + new)
    ]
    slots = torch.full((len(positions) + padding + 3,), 77)
    (kernel,) = [p.replacement for p in ledger.patches(NPU) if "slot_mapping" in p.target]
    kernel[(len(sizes) + 1,)](
        len(positions) + padding,
        len(slots),
        starts,
        torch.tensor([*positions, *[0] * padding], dtype=torch.int64),
        table,
        columns,
        block_size,
        slots,
        PAD_ID=-1,
    )
    assert slots.tolist() == expected + [-1] * (padding + 3)
