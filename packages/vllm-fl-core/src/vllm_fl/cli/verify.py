"""``vllm-fl verify NAME``: run the conformance kit on an installed backend."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys

from vllm_fl.cli.tables import key_values
from vllm_fl.dispatch.errors import ConfigError
from vllm_fl.dispatch.report import backends

DESCRIPTION = "Run the conformance kit on a backend: every operator against a float64 oracle."

_TO_REPORT = (
    "To report this, send what `vllm-fl verify {} --json` and `vllm-fl doctor --json` print."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments, all but ``--json``, which every command has."""
    parser.add_argument(
        "name", metavar="NAME", help="a backend as shown by `vllm-fl list`, or an implementation id"
    )
    parser.add_argument("--device", metavar="D", help="torch device; default: the backend's own")
    parser.add_argument("-k", metavar="EXPR", dest="expression", help="select cases, as pytest -k")


def run(arguments: argparse.Namespace) -> tuple[str, int]:
    """Run the cases; progress goes to standard error.

    Returns:
        What to print (a table, or JSON) and the exit status: 0 if everything passed that was not
        excluded, declined or refused, 1 otherwise.

    Raises:
        ConfigError: pytest or torch is missing, no backend has that name, an exclusion is wrong,
            or no case was selected.
        BackendLoadError: the backend cannot be used here.
    """
    try:
        import pytest  # type: ignore[import-not-found]
        import torch  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"`vllm-fl verify` needs pytest and torch ({error}): pip install "
            "'vllm-fl-core[testing]', and torch as vLLM's documentation says for the device"
        ) from error
    from vllm_fl.testing import suite
    from vllm_fl.testing.tally import Tally
    from vllm_fl.testing.target import find_target

    target = find_target(arguments.name, arguments.device)
    suite.items(target)  # so that a wrong exclusion is told as such, before pytest starts
    tally = Tally()
    options = ["--pyargs", "vllm_fl.testing", "-p", "vllm_fl.testing.plugin"]
    options += [f"--fl-backend={target.name}", f"--fl-device={target.device}"]
    options += ["-k", arguments.expression] if arguments.expression else []
    # The settings and conftest files of the current folder are somebody else's.
    options += ["-c", os.devnull, "--noconftest", "-p", "no:cacheprovider"]
    options += ["-q", "--tb=no", "--no-header", "--no-summary", "--disable-warnings"]
    with contextlib.redirect_stdout(sys.stderr):
        status = pytest.main(options, plugins=[tally])
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise ConfigError(
            f"nothing was verified: -k {arguments.expression!r} selects no case of "
            f"{target.name}. Allowed: words of a case's name joined by `and`, `or` and `not`, "
            "as in -k 'rms_norm and values and bfloat16'."
        )
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise ConfigError(f"nothing was verified: pytest ended with {pytest.ExitCode(status)!r}")
    passed = status == pytest.ExitCode.OK
    told = [row["facts"] for row in backends() if row["name"] == target.name]
    facts = told[0] if told else {}
    if arguments.json:
        head = {"backend": target.name, "device": target.device, "passed": passed}
        head["facts"] = facts
        return json.dumps(head | tally.as_data(), indent=2), int(not passed)
    verdict = "passed" if passed else f"{tally.failed} cases failed"
    title = f"{target.name} on {target.device}: {verdict}."
    facts_text = f"{key_values(facts)}\n" if facts else ""
    lines = [title, facts_text, tally.as_text()]
    if not passed:
        lines += ["", _TO_REPORT.format(target.name)]
    return "\n".join(lines), int(not passed)
