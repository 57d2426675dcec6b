"""The conformance kit's view of attention over a paged cache: vLLM's objects and an oracle."""
