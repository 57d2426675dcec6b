"""A job: the variants that Triton would compile for steps of 1 to 8192 tokens, as a line of JSON.

The kernels are not launched: each launch is turned into the key that Triton compiles for.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from vllm_fl_flaggems.warmup import token_counts

MOST = 8192
keys: set[str] = set()
_binders: dict[Any, Callable[..., Any]] = {}


def record(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
    """Stand in for the launch of a kernel."""
    if self not in _binders:
        _binders[self] = self.create_binder()[-1]
    _, specialization, options = _binders[self](*args, **kwargs)
    keys.add(f"{self.fn.__name__} {specialization} {sorted(options.items())}")


triton.runtime.driver.set_active(
    types.SimpleNamespace(
        get_current_target=lambda: triton.backends.compiler.GPUTarget("cuda", 90, 32)
    )
)
JITFunction.run = record

from vllm_fl_flaggems.ops import activation, norm, rotary  # noqa: E402


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


WEIGHT = empty(4096)
TABLE = empty(40960, 128)
COS, SIN = TABLE.chunk(2, dim=-1)


def rotate(tokens: int, packed: int, query: int, key: int) -> None:
    """Rotate slices of a packed projection."""
    both = empty(tokens, packed * 128)
    q, k = both[:, : query * 128], both[:, query * 128 : (query + key) * 128]
    positions = empty(tokens, dtype=torch.int64)
    rotary.rotary_embedding(
        q.view(tokens, query, 128), k.view(tokens, key, 128), COS, SIN, positions, True
    )


LAYERS: dict[str, Callable[[int], object]] = {
    "silu": lambda t: activation.silu_and_mul(empty(t, 2 * 12288)),
    "silu, narrow": lambda t: activation.silu_and_mul(empty(t, 2 * 96)),
    "gelu": lambda t: activation.gelu_and_mul(empty(t, 2 * 1000), "tanh"),
    "norm": lambda t: norm.rms_norm(empty(t, 4096), None, WEIGHT, 1e-6),
    "add norm": lambda t: norm.rms_norm(empty(t, 4096), empty(t, 4096), WEIGHT, 1e-6),
    "head norm": lambda t: norm.rms_norm(
        empty(t, 48 * 128)[:, :4096].view(t, 32, 128), None, WEIGHT[:128], 1e-6
    ),
    "rotary": lambda t: rotate(t, 48, 32, 8),
    "rotary, few heads": lambda t: rotate(t, 3, 1, 1),
}

report = {}
for name, layer in LAYERS.items():
    for count in token_counts(MOST):
        layer(count)
    warm = set(keys)
    for count in range(1, MOST + 1):
        layer(count)
    report[name] = {"warm": len(warm), "late": sorted(keys - warm)}
    keys.clear()
print(json.dumps(report))
