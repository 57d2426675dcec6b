"""Paged attention by Triton kernels as an attention backend of vLLM.

`planning` decides which kernels a step needs and needs torch alone; `backend` plugs into vLLM.
"""
