"""What the tests of flag_gems do in processes of their own; each job prints a line of JSON."""

from __future__ import annotations

import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import gems_on_cpu
import torch

from vllm_fl.dispatch import SelectionPolicy
from vllm_fl_flaggems.gems import source


def launched() -> None:
    """Launch kernels twice through flag_gems' launcher and a recording one of Triton's.

    Prints, before and after the mends, for each kernel, how many parameters that are no constexprs
    got something else than they were called with at the second launch.
    """
    gems_on_cpu.pretend_device()
    import triton
    from triton.runtime.jit import JITFunction

    target = types.SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    triton.runtime.driver.set_active(
        types.SimpleNamespace(
            get_current_device=lambda: 0,
            get_benchmarker=lambda: None,
            get_current_target=lambda: target,
        )
    )
    found = source.installed()
    assert found is not None
    from flag_gems.ops.flash_kernel import flash_varlen_fwd_kernel
    from flag_gems.ops.rms_norm import rms_norm_kernel

    from vllm_fl_flaggems.gems.worker import import_mended

    passed: list[tuple[object, ...]] = []

    class Compiled:
        def __getitem__(self, grid: object) -> Any:
            return lambda *args: passed.append(args)

    JITFunction.run = lambda self, *args, grid, warmup=False, **kwargs: Compiled()

    def wrong() -> dict[str, int]:
        counts = {}
        for kernel in (rms_norm_kernel, flash_varlen_fwd_kernel):
            params = kernel.jit_function.params
            for _ in range(2):
                kernel[(1,)](*(f"value of {param.name}" for param in params))
            args = passed.pop()
            # As Triton's launcher does since 3.3: a constexpr takes up an argument, too.
            received = dict(zip((param.name for param in params), args, strict=False))
            counts[kernel.jit_function.fn.__name__] = sum(
                received.get(param.name) != f"value of {param.name}"
                for param in params
                if not param.is_constexpr
            )
        return counts

    plain = wrong()
    import_mended(found)
    print(json.dumps({"plain": plain, "mended": wrong()}))


def tuned() -> None:
    """Let flag_gems tune its matrix product, with a damaged cache, a capture and a lock.

    Prints for each launch how many trials there were and which configuration was launched.
    """
    import os
    import sqlite3

    import triton
    from triton.runtime.jit import JITFunction

    major, minor = triton.__version__.split(".")[:2]
    folder = Path(os.environ["FLAGGEMS_CACHE_DIR"], "config_cache")
    folder.mkdir()
    database = folder / f"TunedConfig_none_triton_{major}_{minor}.db"
    database.write_bytes(b"this is no database" * 100)
    os.environ["FLAGGEMS_DB_URL"] = ""
    gems_on_cpu.pretend_device()
    del os.environ["FLAGGEMS_DB_URL"]
    trials: list[float] = []

    def benchmark(kernel: Any, **_: object) -> list[float]:
        trials.append(100.0 - len(trials))  # the last one wins
        return [trials[-1]] * 3

    target = types.SimpleNamespace(backend="cuda", arch=80, warp_size=32)
    triton.runtime.driver.set_active(
        types.SimpleNamespace(
            get_current_device=lambda: 0,
            get_benchmarker=lambda: benchmark,
            get_current_target=lambda: target,
        )
    )
    triton.testing.do_bench = benchmark
    found = source.installed()
    assert found is not None
    from vllm_fl_flaggems.gems.worker import import_mended

    import_mended(found)
    from flag_gems.ops.layernorm import layer_norm_persistent_kernel
    from flag_gems.ops.mm import mm_kernel_general

    launched: list[dict[str, Any]] = []
    JITFunction.run = lambda self, *args, grid, warmup=False, **kwargs: launched.append(kwargs)
    configs = [config.all_kwargs() for config in mm_kernel_general.fn.configs]
    report = {"configs": len(configs)}

    def launch(name: str, m: int, shared: bool = False, capturing: bool = False) -> None:
        torch.cuda.is_current_stream_capturing = lambda: capturing
        a, b, c = torch.empty(m, 64), torch.empty(64, 32), torch.empty(m, 32)
        out = a if shared else c
        strides = (64, 1, 32, 1, 32, 1)
        mm_kernel_general[(1,)](a, b, out, m, 32, 64, *strides, GROUP_M=8)
        chosen = {name: value for name, value in launched[-1].items() if name != "GROUP_M"}
        report[name] = [len(trials), configs.index(chosen)]
        trials.clear()

    launch("captured", 32, capturing=True)
    launch("shared", 96, shared=True)
    launch("free", 128)
    launch("captured later", 127, capturing=True)
    launch("fewer", 65)
    launch("a half", 64)
    with sqlite3.connect(database) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        launch("locked", 160)
    launch("after the lock", 250)
    tuner = layer_norm_persistent_kernel.fn  # one of Triton's own
    while not isinstance(tuner, triton.runtime.Autotuner):
        tuner = tuner.fn
    report["norm"] = [len(tuner.configs)]
    x, w = torch.empty(256, 64), torch.empty(64)
    for m in (65, 128, 64):
        mean, rstd = torch.empty(m), torch.empty(m)
        layer_norm_persistent_kernel[(m,)](
            x[:m], torch.empty(m, 64), w, w.clone(), mean, rstd, m, 64, 1e-6, TILE_N=64
        )
        report["norm"].append(len(trials))
        trials.clear()
    report["files"] = sorted(path.name.partition(".")[2] for path in folder.iterdir())
    tables = sqlite3.connect(database).execute("select name from sqlite_master").fetchall()
    report["tables"] = len([name for (name,) in tables if name.startswith("mm_kernel_general")])
    print(json.dumps(report))


def compiled() -> None:
    """Let kernels be compiled for a Hopper GPU, launch none of them, and freeze the heap.

    Prints the module of flag_gems' matrix product, and the modules of every compiled kernel.
    """
    import gc
    import os

    os.environ["ARCH"] = "sm_90"  # flag_gems' own variable
    gems_on_cpu.CAPABILITY = (9, 0)
    gems_on_cpu.pretend_device()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel

    target = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(
        types.SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_benchmarker=lambda: None,
            get_current_target=lambda: target,
        )
    )
    CompiledKernel.launch_metadata = lambda *_: None
    CompiledKernel.run = property(lambda self: lambda *_: None)
    found = source.installed()
    assert found is not None
    from vllm_fl.profiling.triton_kernels import triton_kernels
    from vllm_fl_flaggems.gems.worker import import_mended
    from vllm_fl_flaggems.ops import norm

    gems = import_mended(found)
    product = sys.modules[gems.mm.__module__]
    tuner = product.mm_kernel_general_host_tma.fn
    tuner.configs = tuner.configs[:1]
    a, b = torch.empty(32, 64, dtype=torch.bfloat16), torch.empty(64, 32, dtype=torch.bfloat16)
    gems.mm(a, b)
    gems.silu(a)
    gems.zeros((4,), device="cpu")
    norm.rms_norm(a, None, a[0], 1e-6)
    gc.freeze()
    print(json.dumps({"product": product.__name__, "kernels": triton_kernels()}))


class Record(logging.Handler):
    """Collects flag_gems' own debug lines: one a call of its functions."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.calls: list[str] = []
        logger = logging.getLogger("flag_gems")
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Note which module was called."""
        self.calls.append(record.name)

    def taken(self) -> list[str]:
        """Return the modules called since the last time."""
        calls, self.calls = sorted(set(self.calls)), []
        return calls


def results(a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    """Call a few ATen operators, of several overloads."""
    return {
        "mm": torch.mm(a, b),
        "mm.out": torch.mm(a, b, out=torch.empty(16, 24)),
        "softmax": torch.softmax(a, -1),
        "silu": torch.nn.functional.silu(a),
        "gt": (a > a[0]).float(),
        "gt.Scalar": (a > 0.5).float(),
        "sum": a.sum(1),
    }


def interpreted(blacklist: str) -> None:
    """Let flag_gems run ATen operators on CPU tensors, and give them back.

    Prints what ran while they were enabled, the largest errors, and what ran afterwards.
    """
    import interpreter

    interpreter.repair()
    gems_on_cpu.pretend_device()
    gems_on_cpu.interpret()
    from vllm_fl_flaggems.gems import aten, worker

    found = source.installed()
    assert found is not None
    policy = SelectionPolicy(flagos_whitelist=["mm", "softmax", "silu", "gt", "sum"])
    enabled = worker.enable(found, aten.select(found, policy))
    assert worker.enable(found, aten.select(found, policy)) is enabled
    record = Record()
    torch.manual_seed(0)
    a, b = torch.randn(16, 32), torch.randn(32, 24)
    ours = results(a, b)
    ran = record.taken()
    fewer = aten.select(found, SelectionPolicy(flagos_whitelist=["mm", "silu"]))
    narrowed = worker.enable(found, fewer)
    results(a, b)
    ran_then = record.taken()
    worker.disable()
    theirs = results(a, b)
    most = aten.select(found, SelectionPolicy(flagos_blacklist=blacklist.split(",")))
    everything = worker.enable(found, most)
    worker.disable()
    print(
        json.dumps(
            {
                "enabled": sorted(enabled.functions),
                "ran": ran,
                "narrowed": sorted(narrowed.functions),
                "ran then": ran_then,
                "ran after": record.taken(),
                "errors": {k: (ours[k] - theirs[k]).abs().max().item() for k in ours},
                "everything": sorted(everything.functions),
                "refused": everything.refused,
            }
        )
    )


if __name__ == "__main__":
    jobs = {"launched": launched, "tuned": tuned, "compiled": compiled, "interpreted": interpreted}
    jobs[sys.argv[1]](*sys.argv[2:])
