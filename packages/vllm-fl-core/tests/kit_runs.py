"""Runs the conformance kit's cases on an implementation that a test has planted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from vllm_fl.dispatch.types import OpImpl
from vllm_fl.testing.case import ConformanceFailure, NotApplicable
from vllm_fl.testing.suite import items
from vllm_fl.testing.target import Target


def implementation(op_name: str, fn: Callable[..., Any], **facts: Any) -> OpImpl:
    """Return an implementation that no wheel has."""
    return OpImpl(op_name, "vendor.planted", "vendor", fn, vendor="planted", **facts)


def run(impl: OpImpl, pattern: str = "*") -> dict[str, str]:
    """Run the cases that match until one fails; return case -> how it ended."""
    ended: dict[str, str] = {}
    for item in items(Target("planted", "cpu", (impl,))):
        if not fnmatchcase(item.case.id, pattern):
            continue
        try:
            item.run()
        except NotApplicable as reason:
            ended[item.case.id] = str(reason)
        except ConformanceFailure as failure:
            return {**ended, item.case.id: f"failed: {failure}"}
        except Exception as error:
            return {**ended, item.case.id: f"crashed: {error!r}"}
        else:
            ended[item.case.id] = "passed"
    return ended


def found(ended: Mapping[str, str]) -> bool:
    """Whether the kit found a fault, rather than that the implementation crashed."""
    return any(end.startswith("failed: ") for end in ended.values())


def is_right(ended: Mapping[str, str]) -> bool:
    """Whether cases passed, and none failed or crashed."""
    ends = ended.values()
    return "passed" in ends and not any(end.startswith(("failed: ", "crashed: ")) for end in ends)
