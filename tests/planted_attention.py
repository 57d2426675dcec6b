"""A plug-in with two attentions of one layout: the default is slow at prefill, the other at decode.

Times are slept, so they are the same anywhere.
"""

from __future__ import annotations

import itertools
import time

from vllm_fl.dispatch import BackendImplKind, OpImpl

SLOW = {"decode": "two", "prefill": "one"}
SECONDS = 0.006
"""What the slow one sleeps in each layer."""


def __getattr__(name):
    """Make the backend classes when they are asked for: vLLM's must not be imported before."""
    import vllm_fl_reference.attention.backend as reference

    class Impl(reference.ReferenceAttentionImpl):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs):
            if attn_metadata is not None:
                starts = attn_metadata.query_start
                longest = max(end - start for start, end in itertools.pairwise(starts))
                if SLOW["prefill" if longest > 1 else "decode"] == name.lower():
                    time.sleep(SECONDS)
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs
            )

    if name not in ("One", "Two"):
        raise AttributeError(name)
    made = type(
        name,
        (reference.ReferenceAttentionBackend,),
        {"__module__": __name__, "get_impl_cls": staticmethod(lambda: Impl)},
    )
    globals()[name] = made
    return made


def one(use_mla=False, use_sparse=False):
    return "planted_attention:One"


def two(use_mla=False, use_sparse=False):
    return "planted_attention:Two"


def register_builtins(registry):
    for fn, priority in ((one, 109), (two, 108)):
        registry.register_impl(
            OpImpl(
                "attention_backend", f"vendor.{fn.__name__}", BackendImplKind.VENDOR, fn,
                vendor=fn.__name__, priority=priority,
            )
        )  # fmt: skip
