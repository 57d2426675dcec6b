"""What attention implementations refuse, in one sentence each."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from vllm_fl.integration.attention_checks import check_layer, check_per_head, check_step, refuse


class Backend:
    supported_kv_cache_dtypes = ("auto", "bfloat16")

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == "decoder"


ALONE = SimpleNamespace(dcp_world_size=1, pcp_world_size=1)
SUPPORTED = {"impl": ALONE, "attn_type": "decoder", "kv_cache_dtype": "auto", "unknown": {}}


def test_what_is_supported_passes():
    check_layer("acme", Backend, **SUPPORTED)
    check_per_head(4, sinks=[0.0] * 4, alibi_slopes=None)
    check_step("acme", SimpleNamespace(mm_req_doc_ranges=None))
    refuse("acme", {"sinks": False})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"attn_type": "encoder"}, "attention type 'encoder'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8'"),
        ({"impl": SimpleNamespace(dcp_world_size=2, pcp_world_size=1)}, "context parallelism"),
        ({"impl": SimpleNamespace(dcp_world_size=1, pcp_world_size=2)}, "context parallelism"),
        ({"unknown": {"lookback": 3}}, "lookback=3"),
    ],
)
def test_a_layer_that_asks_for_more_is_refused(change, what):
    with pytest.raises(
        NotImplementedError, match=f"^{re.escape(f'acme does not support {what}')}$"
    ):
        check_layer("acme", Backend, **{**SUPPORTED, **change})


def test_the_first_of_several_is_named():
    with pytest.raises(NotImplementedError, match=r"^acme does not support sinks$"):
        refuse("acme", {"soft caps": False, "sinks": True, "ALiBi": True})
