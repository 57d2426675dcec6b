"""``python -m vllm_fl`` is ``vllm-fl``."""

from vllm_fl.cli import main

raise SystemExit(main())
