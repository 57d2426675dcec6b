"""The conformance kit, every kernel interpreted."""

from __future__ import annotations

from vllm_fl.testing.suite import conformance_test

test_conformance = conformance_test("flaggems", device="cpu")
