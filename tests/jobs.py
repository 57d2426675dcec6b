"""Jobs in real vLLM and in transformers, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GREEDY = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
ENGINE = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 1 << 28,
    "skip_tokenizer_init": True,
}


class Failed(Exception):
    """A job's process failed; the text is what it printed."""


def run_job(script: str, job: dict[str, Any], folder: Path, **env: str) -> dict[str, Any]:
    """Run a job; return its result.

    Raises:
        Failed: the process did not finish well.
    """
    number = len(list(folder.iterdir()))
    source, result = folder / f"{number}-job.json", folder / f"{number}-result.json"
    source.write_text(json.dumps(job))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
    done = subprocess.run(
        [sys.executable, "-P", str(HERE / script), str(source), str(result)],
        env={**clean, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode != 0:
        raise Failed(done.stdout)
    return {**json.loads(result.read_text()), "log": done.stdout}
