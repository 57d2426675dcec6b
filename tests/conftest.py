"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from overlay import Overlay

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for the modules beside the tests

from jobs import ENGINE, GREEDY, run_job  # noqa: E402

TINY_MODEL = HERE.parent / "examples" / "tiny-qwen3"


@pytest.fixture(scope="session")
def vllm(tmp_path_factory) -> Callable[..., dict[str, Any]]:
    """Run prompts (one batch of token ids, or several batches) in vLLM."""
    folder = tmp_path_factory.mktemp("vllm")

    def run(
        model: Path,
        *batches: list[list[int]],
        new_tokens: int = 64,
        env: dict[str, str] | None = None,
        sampling: dict[str, Any] | None = None,
        embed: bool = False,
        policy: dict[str, Any] | None = None,
        live: list[dict[str, Any] | None] | None = None,
        **engine: Any,
    ) -> dict[str, Any]:
        job = {
            "engine": {"model": str(model), "dtype": "float32", **ENGINE, **engine},
            "batches": batches,
            "sampling": {**GREEDY, "max_tokens": new_tokens, **(sampling or {})},
            "embed": embed,
            "policy": policy,
            "live": live,
        }
        return run_job("run_vllm.py", job, folder, **(env or {}))

    return run


@pytest.fixture(scope="session")
def transformers(tmp_path_factory) -> Callable[..., dict[str, Any]]:
    """Run prompts in transformers."""
    folder = tmp_path_factory.mktemp("transformers")

    def run(
        model: Path, prompts: list[list[int]], new_tokens: int = 64, dtype: str = "float32"
    ) -> dict[str, Any]:
        job = {"model": str(model), "dtype": dtype, "prompts": prompts, "new_tokens": new_tokens}
        return run_job("run_transformers.py", job, folder)

    return run


@pytest.fixture(scope="session")
def check_bfloat16(transformers) -> Callable[..., None]:
    """Check that log-probabilities of vLLM in bf16 are as near to fp32 as transformers', in nats.

    Called with the model, prompts, and the result of a run with ``prompt_logprobs``; and with a
    share of tokens to leave out, those furthest off, where rounding may send a token to another
    expert (transformers' own are then up to 0.4 off).
    """

    def check(
        model: Path, prompts: list[list[int]], result: dict[str, Any], left_out: float = 0.0
    ) -> None:
        exact, theirs = (
            transformers(model, prompts, 1, dtype)["prompt_logprobs"]
            for dtype in ("float32", "bfloat16")
        )
        ours = [output["prompt_logprobs"][1:] for output in result["outputs"][0]]

        def errors(found: list[list[float]]) -> list[float]:
            pairs = zip(found, exact, strict=True)
            all_of_them = sorted(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True))
            return all_of_them[: len(all_of_them) - int(left_out * len(all_of_them))]

        assert max(errors(ours)) < 0.25
        assert fmean(errors(ours)) < 1.25 * fmean(errors(theirs))

    return check


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Sixteen stretches of the tiny model's own text, of 1 to 300 tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    text = (TINY_MODEL / "README.md").read_text() + Path(argparse_file()).read_text()
    ids = tokenizer.encode(text).ids
    lengths = [1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 64, 65, 100, 150, 255, 300]
    return [ids[7 * i : 7 * i + n] for i, n in enumerate(lengths)]


def argparse_file() -> str:
    """A long text that is on every machine."""
    import argparse

    return argparse.__file__


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return TINY_MODEL


@pytest.fixture(scope="session")
def expected(transformers, tiny_model, prompts) -> list[list[int]]:
    """What transformers generates for the prompts, greedily, in fp32."""
    return transformers(tiny_model, prompts)["tokens"]


@pytest.fixture
def plugin(tmp_path) -> Callable[[str], dict[str, str]]:
    """Write a plug-in module; return the environment that names it."""

    def write(code: str) -> dict[str, str]:
        (tmp_path / "plug.py").write_text(code)
        return {"PYTHONPATH": str(tmp_path), "VLLM_FL_PLUGIN_MODULES": "plug"}

    return write


@pytest.fixture
def overlay(tmp_path) -> Overlay:
    """An environment of the test's own, to install wheels into."""
    from overlay import Overlay

    return Overlay(tmp_path / "env")
