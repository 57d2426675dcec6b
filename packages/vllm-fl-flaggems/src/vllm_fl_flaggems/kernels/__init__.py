"""Triton kernels, each in a module with the function that launches it.

What is written here runs on Triton 3.6 to 3.9 and in its interpreter: no block pointers (gone in
3.9), ``&`` and ``|`` on masks (the interpreter drops an operand of ``and``), arithmetic in fp32.
"""
