"""Arguments and sub-commands. Answers without importing torch or vLLM."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from vllm_fl.cli import autotune, new_backend, profile, verify
from vllm_fl.cli.arguments import parse_call
from vllm_fl.cli.tables import key_values, table
from vllm_fl.dispatch.config_file import json_schema
from vllm_fl.dispatch.default import get_default_manager
from vllm_fl.dispatch.errors import VllmFLError
from vllm_fl.dispatch.logging import get_logger
from vllm_fl.dispatch.ops import CATALOGUE, get_spec
from vllm_fl.dispatch.phases import phase_name, split_name
from vllm_fl.dispatch.report import backends, doctor, explain
from vllm_fl.dispatch.settings import BUILT_IN
from vllm_fl.dispatch.state import current_config, current_device, report_unused
from vllm_fl.dispatch.types import YES
from vllm_fl.integration import custom_ops


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    0 fine, 1 no or refused, 2 wrong usage, 130 after Ctrl-C.
    """
    parser = make_parser()
    arguments, others = parser.parse_known_args(argv)
    if others and arguments.run is not profile.run:
        arguments.parser.error(f"unrecognized arguments: {' '.join(others)}")
    arguments.engine_arguments = others
    status = 0
    try:
        text, status = arguments.run(arguments)
        print(text, flush=True)
    except BrokenPipeError:  # the reader has seen enough, as in `vllm-fl doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("vllm-fl: interrupted", file=sys.stderr)
        return 130
    except (VllmFLError, OSError) as error:
        print(f"vllm-fl: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if "torch" in sys.modules:
            raise
        # torch's import failed: it loads the extensions of devices that are installed.
        print(f"vllm-fl: torch cannot be imported: {error} {error.__cause__}", file=sys.stderr)
        return 1
    return status


def _look_up(arguments: argparse.Namespace) -> None:
    if arguments.model is not None:
        from vllm_fl.integration import tuned

        with contextlib.redirect_stdout(sys.stderr):  # vLLM logs to standard output
            tuned.configure(arguments.model, arguments.dtype)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; ``run`` of its result does what was asked for."""
    parser = argparse.ArgumentParser(
        prog="vllm-fl", description="Operators of one stock vLLM on many chips."
    )
    parser.add_argument("--version", action="version", version=f"vllm-fl {version('vllm-fl-core')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        added.add_argument("--json", action="store_true", help="print JSON")
        added.set_defaults(run=run, parser=added)
        return added

    def report(name: str, run: Callable[[argparse.Namespace], str], text: str) -> Any:
        return command(name, lambda arguments: (run(arguments), 0), text)

    report("list", _list, "List the installed backends and what implements each operator.")
    explained = command("explain", _explain, "Say which implementation runs, and why not others.")
    explained.add_argument("op", metavar="OP", help=f"one of: {', '.join(CATALOGUE)}")
    explained.add_argument(
        "--args",
        nargs="+",
        metavar="PARAMETER=VALUE",
        help="arguments of a call, as in: x=bfloat16[8,256] approximate=\"'tanh'\"",
    )
    configured = report("config", _config, "Print every setting with where it came from.")
    for parser_of_choices in (explained, configured):
        parser_of_choices.add_argument(
            "--model", metavar="M", help="use the tuned configuration for this model, if any"
        )
        parser_of_choices.add_argument("--dtype", default="auto", help="of the model, as for vLLM")
    configured.add_argument("--schema", action="store_true", help="print the JSON Schema")
    report("doctor", _doctor, "Print versions, wheels, configuration and faults, for a report.")
    verify.add_arguments(command("verify", verify.run, verify.DESCRIPTION))
    new_backend.add_arguments(report("new-backend", new_backend.run, new_backend.DESCRIPTION))
    profile.add_arguments(command("profile", profile.run, profile.DESCRIPTION))
    autotune.add_arguments(command("autotune", autotune.run, autotune.DESCRIPTION))
    return parser


def _list(arguments: argparse.Namespace) -> str:
    manager = get_default_manager()
    manager.ensure_initialized()
    found = backends()
    choice = current_device()
    chosen = choice.backend
    operators = {
        op: [impl.impl_id for impl in manager.registry.get_implementations(op)] for op in CATALOGUE
    }
    if arguments.json:
        return json.dumps({"backends": found, "device": chosen, "operators": operators}, indent=2)
    rows = [
        [
            row["name"],
            row["wheel"] or row["source"],
            "yes" if row["usable"] else f"no: {row['reason']}",
            (row["device"] or "-") + (" (in use)" if row["name"] == chosen else ""),
        ]
        for row in found
    ]
    names = {row["name"]: row["device"] for row in found}
    refused = [
        f"The device {names[name]} of {name} "
        f"{'was not detected' if name == chosen else 'is not used'}: {decision.reason}"
        for name, decision in choice.claims.items()
        if not decision
    ]
    return "\n\n".join(
        (
            "\n".join((table(["backend", "wheel", "usable", "device"], rows), *refused)),
            table(
                ["operator", "implementations"],
                [[op, ", ".join(impls) or "none"] for op, impls in operators.items()],
            ),
        )
    )


def _explain(arguments: argparse.Namespace) -> tuple[str, int]:
    """Explain; the status is 1 where an operator is dispatched and nothing runs it."""
    _look_up(arguments)
    op_name, asked = split_name(arguments.op)
    call = parse_call(get_spec(op_name), arguments.args) if arguments.args else None
    report = explain(get_default_manager(), op_name, call)
    custom_ops.check_lists()
    layer = custom_ops.decision(op_name) if op_name in custom_ops.LAYERS else YES
    report["layer"] = layer.reason
    phases = {
        phase: decided
        for phase, decided in report.get("phases", {"": report}).items()
        if not asked or phase in ("", asked)
    }
    status = int(bool(layer) and not all(decided["chosen"] for decided in phases.values()))
    if arguments.json:
        return json.dumps(report, indent=2), status
    mode = "strict: the first error raises" if report["strict"] else "falls back on errors"
    lines = [report["operator"], report["summary"]]
    for phase, decided in phases.items():
        lines += ["", f"In the phase {phase}:"] if phase else []
        lines += _decided(phase_name(op_name, phase), decided, mode)
    if not layer:
        lines += ["", f"vLLM keeps its own layer, which does not ask: {layer.reason}."]
    return "\n".join(lines), status


def _decided(name: str, decided: dict[str, Any], mode: str) -> list[str]:
    """Return lines about what was decided for an operator, or for one in a phase."""
    rows = [
        [row["impl_id"], row["wheel"] or "by hand", row["decision"], row["reason"]]
        for row in decided["implementations"]
    ]
    source = decided["source"]
    return [
        f"Order: {' > '.join(decided['order'])}"
        f"{f' (from {source})' if source not in ('', BUILT_IN) else ''}; {mode}.",
        "",
        table(["implementation", "wheel", "decision", "reason"], rows),
        *(
            f"\n{row['impl_id']}: {row['note']}"
            for row in decided["implementations"]
            if row["note"]
        ),
        *(f"\n{text}" for text in decided["unmatched"]),
        *([] if decided["chosen"] else ["", f"Nothing runs {name} under this policy."]),
    ]


def _config(arguments: argparse.Namespace) -> str:
    if arguments.schema:
        return json.dumps(json_schema(), indent=2)
    _look_up(arguments)
    settings = current_config()
    policy = settings.policy()
    custom_ops.check_lists()
    report_unused(settings)
    for problem in get_default_manager().unmatched_vendors(policy):
        get_logger().warning("%s", problem)
    values = settings.values
    if arguments.json:
        return json.dumps({key: vars(value) for key, value in values.items()}, indent=2)
    return table(
        ["setting", "value", "source"],
        [[key, _written(value.value), value.source] for key, value in values.items()],
    )


def _written(value: Any) -> str:
    """Write a setting's value as in YAML."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "; ".join(f"{op}={'|'.join(order)}" for op, order in value.items()) or "-"
    return value if isinstance(value, str) else ", ".join(value) or "-"


def _doctor(arguments: argparse.Namespace) -> str:
    report = doctor(get_default_manager())
    return json.dumps(report, indent=2, default=str) if arguments.json else key_values(report)
