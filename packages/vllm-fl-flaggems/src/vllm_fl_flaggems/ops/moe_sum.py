"""moe_sum."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from vllm_fl_flaggems.kernels import moe_sum as kernels
from vllm_fl_flaggems.moe_tiles import sum_tile
from vllm_fl_flaggems.ops.layout import refusal
from vllm_fl_flaggems.ops.library import define


def supports(input: Tensor, output: Tensor) -> object:
    """Say whether ``moe_sum`` takes these arguments."""
    reason = refusal(input)
    if reason:
        return reason
    if input.dim() != 3 or input.shape[1] == 0:
        return f"input {tuple(input.shape)} is not [tokens, k, width]"
    if output.dtype != input.dtype:
        return f"the output has dtype {output.dtype}, the input {input.dtype}"
    if output.dim() != 2 or not output.is_contiguous():
        return "the output is not a contiguous matrix"
    if output.shape[0] != input.shape[0] or output.shape[1] != input.shape[2]:
        return f"input {tuple(input.shape)} and output {tuple(output.shape)} do not fit"
    return True


def moe_sum(input: Tensor, output: Tensor) -> None:
    """Sum over the experts of each token, in fp32, rounded once (vLLM ``ops.moe_sum``).

    Args:
        input: ``[tokens, k, width]``, fp16, bf16 or fp32, the last dimension contiguous; not
            modified.
        output: ``[tokens, width]``, of the same dtype, contiguous; overwritten.
    """
    if is_compiling():
        output.copy_(torch.ops.vllm_fl_flaggems.moe_sum(input))
    else:
        _sum(output, input)


def _sum(out: Tensor, x: Tensor) -> None:
    if out.numel():
        kernels.moe_sum(out, x, sum_tile(*out.shape))


def _functional(input: Tensor) -> Tensor:
    out = _fake(input)
    _sum(out, input)
    return out


def _fake(input: Tensor) -> Tensor:
    return input.new_empty((input.shape[0], input.shape[2]))


define("moe_sum(Tensor input) -> Tensor", _functional, _fake)
