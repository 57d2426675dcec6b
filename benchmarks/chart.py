"""Draws the results of benchmarks/kernels and benchmarks/e2e.

    python benchmarks/chart.py [RESULT.json ...] [--out docs/images]

Without names, every result in benchmarks/results. One PNG a file, of its name. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

HERE = Path(__file__).parent
COLOURS = {
    "ours": "#1f77b4", "vllm": "#ff7f0e", "inductor": "#2ca02c", "flag_gems": "#9467bd",
    "flash3": "#d62728", "flash3_32": "#ff9896", "vllm_triton": "#bcbd22",
    "native": "#7f7f7f", "control": "#bdbdbd", "null": "#8c564b", "default": "#ff7f0e",
    "vendor": "#2ca02c", "flagos": "#1f77b4", "flagos-gemm": "#9467bd",
}  # fmt: skip
OTHER_COLOURS = ("#17becf", "#e377c2")


def bars(axes: Any, groups: Sequence[str], series: dict[str, list[float | None]]) -> None:
    """Draw one group of bars for each of ``groups``, a bar a series; None leaves a gap."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        present = [(i, value) for i, value in enumerate(values) if value is not None]
        axes.bar(
            [i - 0.4 + width * (number + 0.5) for i, _ in present],
            [value for _, value in present],
            width,
            label=name,
            color=COLOURS[name],
        )
    label(axes, groups)


def points(axes: Any, groups: Sequence[str], series: dict[str, list[Sequence[float]]]) -> None:
    """Draw, for each of ``groups``, a point a series at its median and a line over its range."""
    others = itertools.cycle(OTHER_COLOURS)
    width = 0.7 / max(len(series), 1)
    for number, (name, values) in enumerate(series.items()):
        colour = COLOURS.get(name) or next(others)
        for group, figures in enumerate(values):
            if figures:
                x, middle = group - 0.35 + width * (number + 0.5), statistics.median(figures)
                axes.plot([x, x], [min(figures), max(figures)], color=colour, linewidth=1.5)
                axes.text(x, max(figures), f"{middle:.3f}", fontsize=7, ha="center", va="bottom")
                axes.plot([x], [middle], "o", color=colour, label=None if group else name)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    label(axes, groups)


def label(axes: Any, groups: Sequence[str]) -> None:
    """Write the names of groups below them."""
    slanted = {"rotation": 20, "ha": "right"} if sum(map(len, groups)) > 90 else {}
    axes.set_xticks(range(len(groups)), groups, fontsize=8, **slanted)


def panels_of(count: int, height: float) -> tuple[Figure, list[Any]]:
    """Return a figure and its panels, one above another, each so many inches high."""
    size = (9, height * count)
    figure, panels = pyplot.subplots(count, 1, figsize=size, squeeze=False, layout="constrained")
    return figure, list(panels[:, 0])


def kernels(result: dict[str, Any]) -> Figure:
    """Draw the times of one run of the kernel benchmark: a panel an operator."""
    by_op: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        by_op.setdefault(row["op"], []).append(row)
    figure, panels = panels_of(len(by_op), 3)
    for axes, (op, rows) in zip(panels, by_op.items(), strict=True):
        names = list(dict.fromkeys(name for row in rows for name in row["us"]))
        shapes = ["x".join(map(str, row["shape"])) for row in rows]
        bars(axes, shapes, {name: [row["us"].get(name) for row in rows] for name in names})
        axes.set_yscale("log")
        axes.set_ylabel("µs")
        axes.set_title(op, fontsize=10, loc="left")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(f"Time of a call, {described(result['device'], result['versions'])}")
    return figure


def end_to_end(result: dict[str, Any]) -> Figure:
    """Draw the speeds of one run of benchmarks/e2e over its baseline: a panel a model."""
    models = result["models"]
    figure, panels = panels_of(len(models), 3.4)
    facts: dict[str, Any] = {}
    for axes, (model, modes) in zip(panels, models.items(), strict=True):
        ran = {mode: row for mode, row in modes.items() if row["output_tokens_per_second"]}
        facts = next(iter(ran.values()))["facts"] if ran else facts
        workloads = list(dict.fromkeys(w for r in ran.values() for w in r["ratio"]))
        first_mode = next(iter(ran), None)
        series = {
            mode: [row["ratio"].get(w, ()) for w in workloads]
            for mode, row in ran.items()
            if mode != first_mode
        }
        first = next(iter(ran.values()))["output_tokens_per_second"] if ran else {}
        labels = [
            f"{w}\n{statistics.median(first[w]):.0f} tokens/s" if w in first else w
            for w in workloads
        ]
        points(axes, labels, series)
        axes.axhline(1.0, color="black", linewidth=0.8, label=first_mode)
        axes.margins(y=0.15)
        failed = [mode for mode, row in modes.items() if row["error"]]
        note = f"; could not run: {', '.join(failed)}" if failed else ""
        axes.set_title(f"{model}{note}", fontsize=10, loc="left")
        axes.set_ylabel(f"output tokens/s over {first_mode}'s")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    device = described(facts.get("device", "nothing ran"), facts.get("versions", {}))
    figure.suptitle(f"Batch x prompt x output, {device}", fontsize=10)
    return figure


def described(device: str, versions: dict[str, str]) -> str:
    """Return the device and the versions that matter."""
    shown = [f"{name} {versions[name]}" for name in ("vllm", "torch", "triton") if name in versions]
    return ", ".join((device, *shown))


def main() -> None:
    """Draw every file that is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "images")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    drawn = 0
    for path in arguments.results or sorted((HERE / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if "models" in result:
            figure = end_to_end(result)
        elif "rows" in result and "copy_gbps" in result:
            figure = kernels(result)
        elif arguments.results:
            sys.exit(f"{path} is a result of neither benchmark")
        else:
            continue
        target = arguments.out / f"{path.stem}.png"
        figure.savefig(target, dpi=110)
        pyplot.close(figure)
        print(target)
        drawn += 1
    if not drawn:
        sys.exit("there is nothing to draw")


if __name__ == "__main__":
    main()
