"""The profile as one HTML file that needs nothing else."""

from __future__ import annotations

from html import escape
from typing import Any

_COLOURS = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f",
    "#bcbd22", "#17becf",
)  # fmt: skip
_VIEWPORT = '<meta name="viewport" content="width=device-width, initial-scale=1">'
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #ddd }
td.o { white-space: nowrap } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
.bar { display: flex; height: 1.8rem; margin: .2rem 0 1rem } .bar span { display: block }
.key span { display: inline-block; width: .9rem; height: .9rem; margin: 0 .3rem 0 1rem }
h1, code { overflow-wrap: anywhere } code { font-size: 85% }
/* On a narrow screen a table scrolls inside its own box, so that names stay legible. */
.wide { overflow-x: auto } .wide table { min-width: 36rem }
"""


def render(data: dict[str, Any]) -> str:
    """Return the page for what ``vllm-fl profile --json`` prints."""
    phases = data["phases"]
    work = data["workload"]
    unit = data["unit"]
    names = [row["origin"] for row in phases["all"]["origins"]]
    colour = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    facts = {key: value for key, value in data.items() if key not in ("phases", "workload")}
    title = f"{data['model']}: {unit} by origin"
    key = "".join(
        f'<span style="background:{colour[name]}"></span>{escape(name)}' for name in names
    )
    bars = "".join(_bar(name, found, colour, unit) for name, found in phases.items())
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">{_VIEWPORT}'
        f"<title>{escape(title)}</title>"
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<p>{work['batch']} requests of {work['prompt']} + {work['output']} tokens.</p>"
        f'{bars}<p class="key">{key}</p>'
        f"<h2>Operations</h2>{_table(phases['all']['operations'], ['op'])}"
        f"<h2>Kernels</h2>{_table(phases['all']['kernels'], ['kernel', 'op'])}"
        f"<h2>What ran</h2><table>{''.join(_fact(*item) for item in facts.items())}</table>"
        "</body></html>\n"
    )


def _bar(name: str, found: dict[str, Any], colour: dict[str, str], unit: str) -> str:
    parts = "".join(
        f'<span style="width:{100 * row["share"]:.3f}%;background:{colour[row["origin"]]}" '
        f'title="{escape(row["origin"])}: {row["share"]:.1%}"></span>'
        for row in found["origins"]
    )
    return (
        f"<div>{escape(name)}: {found['us'] / 1000:.2f} ms of {unit} in {found['steps']} steps, "
        f'{found["triton_share"]:.1%} of it compiled by Triton</div><div class="bar">{parts}</div>'
    )


def _table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    lines = "".join(
        f'<tr><td class="n">{row["share"]:.2%}</td>'
        + "".join(f"<td><code>{escape(str(row[column]))}</code></td>" for column in columns)
        + f'<td class="o">{escape(row["origin"])}</td><td class="n">{row["us"] / 1000:.3f}</td>'
        + f'<td class="n">{row["calls"]}</td></tr>'
        for row in rows
    )
    return (
        f'<div class="wide"><table><tr><th class="n">share</th>{head}<th>origin</th>'
        f'<th class="n">ms</th><th class="n">calls</th></tr>{lines}</table></div>'
    )


def _fact(name: str, value: object) -> str:
    return f"<tr><td>{escape(name)}</td><td><code>{escape(str(value))}</code></td></tr>"
