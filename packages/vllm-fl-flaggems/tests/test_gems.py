"""flag_gems 5.0.2 itself: what its table says, its faults and their mends, its ATen operators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.dispatch.discovery import DiscoveredBackend
from vllm_fl.profiling.classify import Kernel, classify, patterns_of
from vllm_fl_flaggems.availability import triton_version
from vllm_fl_flaggems.backend import FlagGemsBackend
from vllm_fl_flaggems.gems import mends
from vllm_fl_flaggems.gems.source import TESTED, installed
from vllm_fl_flaggems.gems.tuning import shared_rows

found = installed()
if found is None:
    pytest.skip("flag_gems is not installed", allow_module_level=True)

TRITON = triton_version() or (0, 0)


def job(tmp_path: Path, *arguments: str, **env: str) -> Any:
    """Run a job of gems_jobs.py in a process of its own; return what it printed."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_FL_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("gems_jobs.py")), *arguments],
        env={**environ, "FLAGGEMS_CACHE_DIR": str(tmp_path), "VLLM_PLUGINS": "", **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_table_is_read_off_the_source() -> None:
    assert found.version == TESTED
    assert len(found.entries) == 433
    assert found.matching(frozenset({"mm"})) == {"mm", "mm.out"}
    assert found.matching(frozenset({"softmax"})) == {"_softmax"}
    assert found.matching(frozenset({"pow"})) == {
        "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
    }  # fmt: skip
    assert found.matching(frozenset({"pow.Scalar", "true_divide_out"})) == {"pow.Scalar", "div.out"}
    assert "flag_gems" not in sys.modules


def test_the_launcher_loses_arguments_where_the_ledger_says_so_and_keeps_them_mended(
    tmp_path: Path,
) -> None:
    (launcher,) = (mend for mend in mends.MENDS if mend.name == "launcher")
    wrong = job(tmp_path, "launched")
    assert wrong["mended"] == {"rms_norm_kernel": 0, "flash_varlen_fwd_kernel": 0}
    plain = wrong["plain"]
    assert plain["rms_norm_kernel"] == 0  # all its constexprs come last
    assert bool(plain["flash_varlen_fwd_kernel"]) == launcher.needed(found)
    assert launcher.needed(found) == (TRITON >= (3, 7)), "remove the entry if flag_gems is mended"
    if launcher.needed(found):
        assert plain["flash_varlen_fwd_kernel"] == 13


def test_tuning_is_declined_where_it_does_harm_and_survives_its_cache(tmp_path: Path) -> None:
    report = job(tmp_path, "tuned")
    every = report["configs"]
    assert every > 1
    assert report["captured"] == report["shared"] == [0, 0]
    assert report["free"] == report["locked"] == report["a half"] == [every, every - 1]
    assert report["captured later"] == report["fewer"] == [0, every - 1]
    assert report["after the lock"] == [0, every - 1]
    of_norm = report["norm"][0]
    assert of_norm > 1
    assert report["norm"][1:] == [of_norm, 0, of_norm]
    assert report["files"] == ["db", "db.damaged"]
    assert report["tables"] >= 1


@pytest.mark.parametrize(
    ("rows", "shared"),
    [(0, 32), (1, 32), (32, 32), (33, 64), (64, 64), (65, 128), (8191, 8192), (8193, 16384)],
)
def test_rows_up_to_a_power_of_two_are_tuned_once(rows: int, shared: int) -> None:
    assert shared_rows(rows) == shared


def test_profiles_know_whose_kernels_triton_has_compiled(tmp_path: Path) -> None:
    """flag_gems imports its kernels for Hopper by short names, and generates pointwise ones."""
    report = job(tmp_path, "compiled", TRITON_CACHE_DIR=str(tmp_path / "triton"))
    assert report["product"] == "hopper.ops.mm"
    patterns = patterns_of([DiscoveredBackend("flaggems", "here", backend=FlagGemsBackend())])
    kernels = {
        name: classify(name, patterns, report["kernels"])
        for name in (*report["kernels"], "promote_to_tensor")
    }
    assert kernels == {
        "mm_kernel_general_host_tma": Kernel("mm_kernel_general_host_tma", "flag_gems", True),
        "silu_forward_kernel_rank_1": Kernel("silu_forward_kernel_rank_1", "flag_gems", True),
        "zeros_kernel": Kernel("zeros_kernel", "flag_gems", True),
        "_rms_norm_kernel": Kernel("rms_norm", "vllm-fl-flaggems", True),
        "promote_to_tensor": Kernel("promote_to_tensor", "other", False),  # no kernel
    }


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gems")
    return job(folder, "interpreted", "gt,tanh", TRITON_INTERPRET="1")


def test_aten_operators_run_through_flag_gems(interpreted: Any) -> None:
    assert interpreted["enabled"] == [
        "_softmax", "gt.Scalar", "gt.Tensor", "mm", "mm.out", "silu", "sum", "sum.IntList_out",
        "sum.dim_IntList", "sum.out",
    ]  # fmt: skip
    modules = [f"flag_gems.ops.{name}" for name in ("gt", "mm", "silu", "softmax", "sum")]
    assert interpreted["ran"] == modules
    assert set(interpreted["errors"]) == {
        "mm", "mm.out", "softmax", "silu", "gt", "gt.Scalar", "sum",
    }  # fmt: skip
    assert all(error < 1e-5 for error in interpreted["errors"].values()), interpreted["errors"]


def test_another_selection_takes_the_place_of_the_one_before(interpreted: Any) -> None:
    assert interpreted["narrowed"] == ["mm", "mm.out", "silu"]
    assert interpreted["ran then"] == ["flag_gems.ops.mm", "flag_gems.ops.silu"]


def test_disabled_they_are_pytorchs_again(interpreted: Any) -> None:
    assert interpreted["ran after"] == []


def test_without_a_whitelist_everything_but_what_is_listed(interpreted: Any) -> None:
    enabled = set(interpreted["everything"])
    assert len(enabled) > 350
    assert enabled.isdisjoint({"gt.Tensor", "gt.Scalar", "tanh"})
    assert enabled.isdisjoint({"exponential_", "multinomial", "index.Tensor", "copy_", "nonzero"})
    assert {"mm", "bmm", "addmm", "mul.Tensor", "tanh_"} <= enabled


def test_kernels_with_block_pointers_are_left_out_where_triton_has_none(interpreted: Any) -> None:
    refused = interpreted["refused"]
    assert ("_grouped_mm" in refused) == (TRITON >= (3, 8))
    for key, reason in refused.items():
        assert "block pointers" in reason, key


def test_the_ledger_explains_itself() -> None:
    for mend in mends.MENDS:
        assert mend.why.endswith(".")
        assert mend.until.endswith(".")
        assert mend.versions.startswith("flag_gems 5.0.2 with Triton 3.7")
        assert mend.needed(found) == (TRITON >= (3, 7))
