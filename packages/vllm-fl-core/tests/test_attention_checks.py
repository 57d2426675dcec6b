"""What attention implementations refuse, in one sentence each."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from vllm_fl.integration.attention_checks import (
    check_layer,
    check_per_head,
    check_step,
    context_parallel_problems,
    refuse,
)


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


ABILITIES = ("supports_dcp", "can_return_lse_for_decode",
             "supports_mtp_with_cp_non_trivial_interleave_size")  # fmt: skip
DCP = "decode_context_parallel_size=2 not supported"
INTERLEAVED = "cp_kv_cache_interleave_size=4 with speculative decoding not supported"


@pytest.mark.parametrize(
    ("decode", "prefill", "interleave", "speculates", "lacking", "problems"),
    [
        (1, 1, 4, True, ABILITIES, []),
        (2, 1, 1, False, (), []),
        (2, 1, 1, False, ABILITIES[:1], [DCP]),
        (2, 1, 1, False, ABILITIES[1:2], [DCP]),
        (2, 1, 4, False, ABILITIES[2:], []),
        (2, 1, 1, True, ABILITIES[2:], []),
        (2, 1, 4, True, (), []),
        (2, 1, 4, True, ABILITIES, [DCP, INTERLEAVED]),
        (1, 2, 4, True, ABILITIES, [INTERLEAVED]),
    ],
)
def test_what_context_parallelism_needs_of_the_layers(
    decode, prefill, interleave, speculates, lacking, problems
):
    impl = SimpleNamespace(**{ability: ability not in lacking for ability in ABILITIES})
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=decode,
            prefill_context_parallel_size=prefill,
            cp_kv_cache_interleave_size=interleave,
        ),
        speculative_config=object() if speculates else None,
    )
    backend = SimpleNamespace(get_impl_cls=lambda: impl)
    assert context_parallel_problems(backend, config) == problems
