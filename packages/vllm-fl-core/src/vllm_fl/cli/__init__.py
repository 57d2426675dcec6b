"""The command line ``vllm-fl``."""

from vllm_fl.cli.main import main

__all__ = ["main"]
