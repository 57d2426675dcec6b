"""A plug-in with planted choices for the tuner; times are slept, so they are the same anywhere.

A slow default of silu_and_mul with alternatives that are wrong or end the process; a slow default
of rms_norm; and a rotary embedding that is fast alone and slow after the fast rms_norm.
"""

from __future__ import annotations

import os
import time

from vllm_fl.dispatch import BackendImplKind, OpImpl

SILU, RMS, ROTARY, TOGETHER = 0.006, 0.002, 0.006, 0.03
CALLS = {"silu_and_mul": 4, "rms_norm": 17, "rotary_embedding": 4}
"""In one step of the tiny model."""
_last = {"rms": ""}


def cost(configuration):
    """Seconds that the planted choices add to a step."""
    silu, rms, rotary = (configuration[op].rpartition(".")[2] for op in CALLS)
    total = SILU * CALLS["silu_and_mul"] * (silu == "slow")
    total += RMS * CALLS["rms_norm"] * (rms == "slow")
    total += ROTARY * CALLS["rotary_embedding"] * (rotary == "slow")
    return total + TOGETHER * CALLS["rotary_embedding"] * (rms == rotary == "fast")


def silu_slow(x):
    from vllm_fl_reference.ops.activation import silu_and_mul

    time.sleep(SILU)
    return silu_and_mul(x)


def silu_wrong(x):
    return x[..., : x.shape[-1] // 2].contiguous()


def silu_deadly(x):
    os._exit(7)


def rms_slow(x, residual, weight, epsilon):
    from vllm_fl_reference.ops.norm import rms_norm

    time.sleep(RMS)
    _last["rms"] = "slow"
    return rms_norm(x, residual, weight, epsilon)


def rms_fast(x, residual, weight, epsilon):
    from vllm_fl_reference.ops.norm import rms_norm

    _last["rms"] = "fast"
    return rms_norm(x, residual, weight, epsilon)


def rotary_slow(query, key, cos, sin, position_ids, is_neox_style):
    from vllm_fl_reference.ops.rotary import rotary_embedding

    time.sleep(ROTARY)
    return rotary_embedding(query, key, cos, sin, position_ids, is_neox_style)


def rotary_fast(query, key, cos, sin, position_ids, is_neox_style):
    from vllm_fl_reference.ops.rotary import rotary_embedding

    if _last["rms"] == "fast":
        time.sleep(TOGETHER)
    _last["rms"] = ""
    return rotary_embedding(query, key, cos, sin, position_ids, is_neox_style)


def register_builtins(registry):
    planted = {
        "silu_and_mul": (silu_slow, silu_wrong, silu_deadly),
        "rms_norm": (rms_slow, rms_fast),
        "rotary_embedding": (rotary_slow, rotary_fast),
    }
    for op_name, functions in planted.items():
        for place, fn in enumerate(functions):
            name = fn.__name__.rpartition("_")[2]
            registry.register_impl(
                OpImpl(
                    op_name, f"vendor.acme.{name}", BackendImplKind.VENDOR, fn, vendor="acme",
                    priority=109 - place,
                )
            )  # fmt: skip
