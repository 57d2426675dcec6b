"""Compiles the attention kernels for compute capability 9.0 without a GPU; prints facts as JSON.

Run in a process of its own, in which kernels are not interpreted.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_fl_flaggems import tiles
from vllm_fl_flaggems.kernels.attention_decode import _decode_kernel
from vllm_fl_flaggems.kernels.attention_prefill import _prefill_kernel

POINTERS = {"table": "*i32", "query_start": "*i32", "lengths": "*i32", "slopes": "*fp32",
            "parts": "*fp32", "logs": "*fp32"}  # fmt: skip
FEATURES = {"CAUSAL": 1, "WINDOW": False, "CAP": False, "SINKS": False, "ALIBI": False,
            "PRECISION": "tf32", "OVERLAP": True}  # fmt: skip


def compiled(
    kernel: Any, tile: tiles.AttentionTile, size: int, group: int, page: int
) -> tuple[Any, str]:
    """Compile a kernel as a bf16 model would launch it; also return the remarks of ptxas."""
    constants: dict[str, Any] = {
        **FEATURES, "GROUP": group, "HEADS": min(group, tile.block_m), "D": size,
        "BLOCK_D": tile.block_d, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "PAGE": page,
        "sinks": None, "slopes": None, "causal": None,
    }  # fmt: skip
    if not isinstance(tile, tiles.DecodeTile):
        constants |= {"BLOCK_STRIDE": page * 8 * 2 * size, "TOKEN_STRIDE": 8 * 2 * size}
    else:
        constants |= {"KV_HEADS": 8, "JOINED": tile.splits > 1}
        if tile.splits == 1:
            constants |= {"parts": None, "logs": None}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in (*POINTERS, "out", "query", "keys", "values"):
            signature[name] = POINTERS.get(name, "*bf16")
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif name in ("scale", "cap"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name.endswith("stride"):
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(n),): value for n, value in constants.items()},
        attrs=attributes,
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.registers is not None:
        options["maxnreg"] = tile.registers
    remarks = io.StringIO()
    with contextlib.redirect_stdout(remarks):
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return found, remarks.getvalue()


def facts(found: Any, remarks: str, tile: tiles.AttentionTile) -> dict[str, int]:
    """Count what matters in the code; of the loads, how many tiles of keys and values they are."""
    ptx = found.asm["ptx"]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    # A thread copies 16 bytes at once.
    copies = 2 * tile.block_n * tile.block_d * 2 // (16 * 32 * tile.warps)
    (stack,) = re.findall(r"STACK:(\d+)", usage)
    return {
        "stages": tile.stages,
        "tiles_loaded": len(re.findall(r"cp\.async\.cg\.shared", ptx)) // copies,
        "warpgroup_products": len(re.findall(r"wgmma\.mma_async", ptx)),
        "warp_products": len(re.findall(r"mma\.sync", ptx)),
        "serialized": remarks.count("instructions are serialized"),
        "shared": found.metadata.shared,
        "stack": int(stack),
    }


def main() -> None:
    """Compile the tiles that are chosen for common heads."""
    triton.knobs.nvidia.dump_ptxas_log = True
    results = {}
    for size, page in ((64, 64), (128, 16), (256, 16)):
        tile = tiles.prefill_tile(size, 2, 4096)
        found = compiled(_prefill_kernel, tile, size, 4, page)
        results[f"prefill {size} {page}"] = facts(*found, tile)
        for splits_for in (8, 4096):
            choice = tiles.decode_tile(size, 2, 4, splits_for, 8192)
            found = compiled(_decode_kernel, choice, size, 4, page)
            results[f"decode {size} {page} {choice.splits}"] = facts(*found, choice)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
