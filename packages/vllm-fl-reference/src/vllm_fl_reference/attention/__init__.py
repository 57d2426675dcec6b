"""Attention over a paged key/value cache in plain PyTorch.

`planning` and `paged` hold the index work and the mathematics and need torch alone; `backend`
plugs them into vLLM.
"""
