"""flag_gems in a process of vLLM: its ATen operators, and what has to be mended before they run.

Only :mod:`~vllm_fl_flaggems.gems.worker` and what it imports may import flag_gems, which starts
the device; the other modules read its source.
"""
