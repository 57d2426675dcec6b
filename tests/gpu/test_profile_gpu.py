"""``vllm-fl profile`` on a GPU: whose kernels run is measured, with and without vllm-fl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

nvml = pytest.importorskip("vllm_fl_cuda.nvml")
pytestmark = pytest.mark.skipif(not nvml.detect(), reason=str(nvml.detect().reason))

TINY_MODEL = Path(__file__).parents[2] / "examples" / "tiny-qwen3"
LAYERS = ("silu_and_mul", "rms_norm", "rotary_embedding")


def profile(*arguments, **environ):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
    done = subprocess.run(
        [
            sys.executable, "-P", "-m", "vllm_fl", "profile", str(TINY_MODEL), "--json",
            "--dtype", "bfloat16", "--batch", "4", "--prompt-tokens", "64",
            "--output-tokens", "8", "--kv-cache-memory-bytes", str(1 << 28),
            "--gpu-memory-utilization", "0.05", *arguments,
        ],
        env={**clean, "VLLM_USE_FLASHINFER_SAMPLER": "0", **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def shares(data):
    return {row["origin"]: row["share"] for row in data["phases"]["all"]["origins"]}


def check_every_kernel_is_known(data):
    assert data["unit"] == "device time"
    assert shares(data).get("other", 0.0) < 0.02, [
        row["kernel"] for row in data["phases"]["all"]["kernels"] if row["origin"] == "other"
    ]


def test_vllm_alone():
    data = profile(VLLM_PLUGINS="")
    check_every_kernel_is_known(data)
    assert data["dispatched"] == {}
    found = shares(data)
    assert {"FlashAttention", "cuBLAS"} <= set(found)
    assert "vllm-fl-flaggems" not in found
    assert 0 < data["phases"]["all"]["triton_share"] < 1  # Inductor's


@pytest.mark.parametrize("eager", [True, False])
def test_triton_layers(eager):
    """Compiled graphs have the kernels that Inductor makes of the operators' formulas."""
    data = profile(
        *(["--enforce-eager"] if eager else []),
        VLLM_FL_PER_OP=";".join(f"{op}=flagos" for op in LAYERS),
        VLLM_FL_OOT_WHITELIST=",".join(LAYERS),
    )
    check_every_kernel_is_known(data)
    origins = {}
    for row in data["phases"]["all"]["operations"]:
        origins.setdefault(row["op"], set()).add(row["origin"])
    operations = ("rms_norm", "gated activation", "rotary_embedding")
    if eager:
        assert {op: origins[op] for op in operations} == {
            op: {"vllm-fl-flaggems"} for op in operations
        }
    else:
        assert "Inductor" in shares(data)
        assert not any("vLLM CUDA" in origins.get(op, ()) for op in operations)


def test_vendor_layers():
    data = profile(
        "--enforce-eager",
        VLLM_FL_PREFER="vendor",
        VLLM_FL_PER_OP="attention_backend=vendor",
        VLLM_FL_OOT_WHITELIST=",".join(LAYERS),
    )
    check_every_kernel_is_known(data)
    operations = {(row["op"], row["origin"]) for row in data["phases"]["all"]["operations"]}
    for op in ("rms_norm", "gated activation", "rotary_embedding", "reshape_and_cache_flash"):
        assert (op, "vLLM CUDA") in operations, op
    assert "vllm-fl-flaggems" not in shares(data)


@pytest.mark.skipif(find_spec("flag_gems") is None, reason="flag_gems is not installed")
def test_matrix_products_of_flag_gems():
    data = profile("--enforce-eager", USE_FLAGGEMS="1", VLLM_FL_FLAGOS_WHITELIST="mm,addmm")
    check_every_kernel_is_known(data)
    everything = data["phases"]["all"]
    ours = [row for row in everything["kernels"] if row["origin"] == "flag_gems"]
    assert shares(data)["flag_gems"] > 0
    assert all(row["triton"] for row in ours)
    assert 0 < everything["triton_share"] < 1
