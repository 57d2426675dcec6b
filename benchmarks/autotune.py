"""AutoTune on a model of benchmarks/e2e: from all operators on flagos to the tuned configuration.

    python -m benchmarks.autotune --model qwen3-30b-a3b --layers 12 --time-budget 20m

Tunes under a configuration with every operator on flagos and attention by the vendor, which stays;
vendor and reference are available. Then benchmarks/e2e measures native vLLM, that configuration,
the vendor alone and the result in turns. More arguments go to `vllm-fl autotune`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.e2e.models import write_model
from vllm_fl.dispatch.ops import CATALOGUE

HERE = Path(__file__).parent


def main() -> None:
    """Tune, then compare; results go to benchmarks/results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-30b-a3b", help="as for benchmarks/e2e")
    parser.add_argument("--layers", type=int, default=12, help="cut the model to so many")
    parser.add_argument("--folder", type=Path, default=Path("autotune-work"))
    arguments, more = parser.parse_known_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / arguments.model
    if not model.exists():
        model = write_model(arguments.model, arguments.layers, folder)
    orders = {op: ["flagos", "vendor"] for op in CATALOGUE} | {"attention_backend": ["vendor"]}
    base = folder / "flagos.yaml"
    base.write_text(json.dumps({"op_backends": orders}))  # JSON is YAML
    out = HERE / "results" / "autotune.yaml"
    engine = {"load_format": "dummy", "gpu_memory_utilization": 0.8}
    subprocess.run(
        [
            "vllm-fl", "autotune", "--model", str(model), "--engine", json.dumps(engine),
            "--keep", "attention_backend", "--out", str(out),
            "--storage", f"sqlite:///{folder / 'study.db'}", *more,
        ],
        env={**os.environ, "VLLM_FL_CONFIG": str(base)},
        check=True,
    )  # fmt: skip
    modes = [f"flagos={base}", "vendor", *([f"tuned={out}"] if out.exists() else [])]
    subprocess.run(
        [
            sys.executable, "-m", "benchmarks.e2e", "--model", str(model),
            *(part for mode in modes for part in ("--mode", mode)),
            "--live", str(len(modes) + 1), "--out", str(HERE / "results" / "autotune-e2e.json"),
        ],
        check=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
