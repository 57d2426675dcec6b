"""The patch ledger: every patch of vLLM is explained, and still needed by the installed vLLM."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("vllm")

from vllm_fl_reference.vllm_compat import adapter, adapter_name
from vllm_fl_reference.vllm_compat.common import ACCELERATOR_CACHES

LEDGER = (*adapter().PATCHES, *ACCELERATOR_CACHES)


@pytest.mark.parametrize("patch", LEDGER, ids=lambda patch: patch.target)
def test_a_patch_is_explained_and_vllm_still_needs_it(patch):
    module, _, attribute = patch.target.partition(":")
    assert hasattr(importlib.import_module(module), attribute)
    assert patch.needed(), f"vLLM no longer needs the patch of {patch.target}: remove it"
    assert patch.why.endswith(".")
    assert patch.until.endswith(".")


@pytest.mark.parametrize(
    ("version", "name"),
    [("0.26.0", "v0_26"), ("0.27.1", "v0_26"), ("0.28.0", "v0_28"), ("0.33.1rc1", "v0_33")],
)
def test_an_adapter_serves_the_versions_up_to_the_next(version, name):
    assert adapter_name(version) == name


def test_an_older_vllm_has_no_adapter():
    with pytest.raises(RuntimeError, match=r"0\.25\.0 is not supported"):
        adapter_name("0.25.0")
