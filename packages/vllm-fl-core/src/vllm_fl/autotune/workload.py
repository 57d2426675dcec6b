"""Workloads: requests with prompt and output lengths and times of arrival. Pure but for reading."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_fl.dispatch.config_file import read
from vllm_fl.dispatch.errors import ConfigError, nearest


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        prompt: tokens of the prompt.
        output: tokens to generate.
        arrival: seconds after the start.
    """

    prompt: int
    output: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Requests that are served in one run.

    Attributes:
        name: shown to people.
        requests: in order of arrival.
        concurrency: requests that the engine runs at once at most.
    """

    name: str
    requests: tuple[Request, ...]
    concurrency: int

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(request.prompt + request.output for request in self.requests)

    @property
    def summary(self) -> str:
        """One line for people."""
        prompts = sorted(request.prompt for request in self.requests)
        outputs = sorted(request.output for request in self.requests)
        return (
            f"{self.name}: {len(self.requests)} requests, prompts {prompts[0]} to {prompts[-1]}, "
            f"outputs {outputs[0]} to {outputs[-1]} tokens, {self.concurrency} at once"
        )

    def as_commands(self, vocabulary: int, seed: int = 0) -> list[dict[str, Any]]:
        """Return the requests with token ids, the same in every process."""
        generator = random.Random(seed)
        return [
            {
                "prompt": [generator.randrange(vocabulary) for _ in range(request.prompt)],
                "output": request.output,
                "arrival": request.arrival,
            }
            for request in self.requests
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the content as JSON-ready containers."""
        return asdict(self)


@dataclass(frozen=True)
class Shape:
    """How the requests of a workload are drawn; what a workload file holds.

    Attributes:
        requests: how many.
        prompt: a number of tokens, or [least, most].
        output: a number of tokens, or [least, most].
        concurrency: requests at once at most.
        rate: requests a second, arriving at random (Poisson); None: all are there at the start.
        seed: of the draw.
    """

    requests: int
    prompt: int | list[int]
    output: int | list[int]
    concurrency: int = 64
    rate: float | None = None
    seed: int = 0

    def draw(self, name: str) -> Workload:
        """Draw the requests; lengths are spread evenly over the logarithm."""
        generator = random.Random(self.seed)
        arrival, drawn = 0.0, []
        for _ in range(self.requests):
            prompt = _draw_length(generator, self.prompt)
            drawn.append(Request(prompt, _draw_length(generator, self.output), arrival))
            if self.rate is not None:
                arrival += generator.expovariate(self.rate)
        return Workload(name, tuple(drawn), self.concurrency)


def _draw_length(generator: random.Random, span: int | list[int]) -> int:
    if isinstance(span, int):
        return span
    least, most = span
    return min(most, int(least * ((most + 1) / least) ** generator.random()))


PRESETS: Mapping[str, Shape] = {
    "chat": Shape(requests=128, prompt=[64, 1024], output=[32, 256], concurrency=64),
    "prefill": Shape(requests=32, prompt=[2048, 4096], output=16, concurrency=32),
    "decode": Shape(requests=64, prompt=64, output=256, concurrency=64),
    "single": Shape(requests=2, prompt=128, output=128, concurrency=1),
    "smoke": Shape(requests=4, prompt=[8, 32], output=8, concurrency=4),
}


def load(text: str) -> Workload:
    """Return the workload of a preset's name or of a YAML file that describes a :class:`Shape`.

    Raises:
        ConfigError: neither, or the file holds something that is not allowed.
    """
    if text in PRESETS:
        return PRESETS[text].draw(text)
    path = Path(text)
    if not path.is_file():
        raise ConfigError(f"{text!r} is neither a file nor a preset. {nearest(text, PRESETS)}")
    from vllm_fl.dispatch.yaml_text import parse  # slow to import

    content = parse(read(path), str(path))
    known = Shape.__dataclass_fields__
    for key in content:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}. {nearest(str(key), known)}")
    missing = [key for key in ("requests", "prompt", "output") if key not in content]
    if missing:
        raise ConfigError(f"{path}: {', '.join(missing)} is missing.")
    for key, value in content.items():
        _check(path, key, value)
    return Shape(**content).draw(path.stem)


def _check(path: Path, key: str, value: Any) -> None:
    def count(number: Any) -> bool:
        return isinstance(number, int) and not isinstance(number, bool) and number > 0

    if key in ("prompt", "output"):
        span = [value, value] if count(value) else value
        good = isinstance(span, list) and len(span) == 2 and all(map(count, span))
        if not good or span[0] > span[1]:
            raise ConfigError(f"{path}: {key}: {value!r} is not tokens, nor [least, most].")
    elif key in ("requests", "concurrency"):
        if not count(value):
            raise ConfigError(f"{path}: {key}: {value!r} is not a positive whole number.")
    elif key == "rate":
        if value is not None and not (isinstance(value, (int, float)) and value > 0):
            raise ConfigError(f"{path}: rate: {value!r} is not a positive number.")
    elif not isinstance(value, int):
        raise ConfigError(f"{path}: seed: {value!r} is not a whole number.")
