"""What Triton's interpreter cannot do: it multiplies bit patterns of bf16, and rounds to zero.

It does so silently, in Triton 3.6 to 3.9. A small product tells, so that an interpreter that can is
used.
"""

# ruff: noqa: ANN001, ANN202  (a Triton function's parameters have no Python types)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_fl_flaggems.kernels.launch import INTERPRETED

_SIZE = 16
_ADDED = tl.constexpr(0.75 * 2**-7)  # to 1: three quarters of the way to the next bf16


@triton.jit
def _product(out, x, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x + place)
    tl.store(out + place, (tl.dot(x, x) + _ADDED).to(tl.bfloat16))


def _computes_bfloat16() -> bool:
    one = torch.eye(_SIZE, dtype=torch.bfloat16)
    out = torch.empty_like(one)
    _product[(1,)](out, one, _SIZE)
    return torch.equal(out, (one.float() + _ADDED.value).bfloat16())


BFLOAT16_REFUSAL: str = (
    "Triton's interpreter computes bfloat16 wrongly; use float16 or float32 with it"
    if INTERPRETED and not _computes_bfloat16()
    else ""
)
"""Why kernels do not take bf16 here; "" if they do."""
