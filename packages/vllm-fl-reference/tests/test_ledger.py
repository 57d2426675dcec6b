"""The patch ledger: every patch of vLLM is explained, and still needed by the installed vLLM."""

from __future__ import annotations

import pytest
from packaging.version import Version

pytest.importorskip("vllm")

from vllm_fl.dispatch import VllmFLError
from vllm_fl.integration.versions import adapter_module
from vllm_fl_reference.vllm_compat import ADAPTERS, adapter
from vllm_fl_reference.vllm_compat.common import ACCELERATOR_CACHES

LEDGER = (*adapter().PATCHES, *ACCELERATOR_CACHES)


@pytest.mark.parametrize("patch", LEDGER, ids=lambda patch: patch.target)
def test_a_patch_is_explained_and_vllm_still_needs_it(patch):
    assert patch.is_needed(), f"vLLM no longer needs the patch of {patch.target}: remove it"
    assert patch.why.endswith(".")
    assert patch.until.endswith(".")


@pytest.mark.parametrize(
    ("version", "name"),
    [("0.26.0", "v0_26"), ("0.27.1", "v0_26"), ("0.28.0", "v0_28"), ("0.33.1rc1", "v0_33")],
)
def test_an_adapter_serves_the_versions_up_to_the_next(version, name):
    assert adapter_module(ADAPTERS, Version(version)) == name


def test_an_older_vllm_has_no_adapter():
    with pytest.raises(VllmFLError, match=r"0\.25\.0 is not supported: 0\.26 is the oldest"):
        adapter_module(ADAPTERS, Version("0.25.0"))
