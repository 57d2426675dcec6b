"""Charts of the report as SVG, drawn from data alone. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 900
LEFT = 70
GREEN, RED, GREY, BLUE = "#1a7f37", "#b3261e", "#6b7280", "#1f5fbf"


@dataclass(frozen=True)
class Point:
    """A value with its interval.

    Attributes:
        label: shown on hovering, and under the axis when it is short.
        value: the value.
        low: lower end; None for none.
        high: upper end; None for none.
        colour: of the mark.
    """

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    colour: str = BLUE


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    step = 10 ** math.floor(math.log10((high - low) / count))
    step = next(m * step for m in (1, 2, 5, 10) if (high - low) / (m * step) <= count)
    first = math.ceil(low / step) * step
    return [first + i * step for i in range(int((high - first) / step + 1e-9) + 1)]


def _number(value: float) -> str:
    """Write three significant digits without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {more}/>'
    )


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def dots(points: Sequence[Point], title: str, unit: str, level: float = 1.0) -> str:
    """Draw values with intervals side by side, and a line at ``level``."""
    height, top, bottom = 320, 20, 280
    ends = [
        end for p in points for end in (p.value, p.low, p.high) if end is not None
    ] + [level]  # fmt: skip
    low, high = min(ends), max(ends)
    pad = (high - low) * 0.08 or 0.05
    low, high = low - pad, high + pad

    def y_of(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - top)

    parts = []
    for tick in _ticks(low, high):
        parts.append(_line(LEFT, y_of(tick), WIDTH - 10, y_of(tick), "#e5e7eb"))
        parts.append(_text(LEFT - 8, y_of(tick) + 4, f"{tick:.3g}", "end"))
    parts.append(_line(LEFT, y_of(level), WIDTH - 10, y_of(level), GREY, 'stroke-dasharray="5 4"'))
    step = (WIDTH - 20 - LEFT) / max(1, len(points))
    for place, point in enumerate(points):
        x = LEFT + step * (place + 0.5)
        parts.append(f"<g><title>{escape(point.label)}: {point.value:.4g}</title>")
        if point.low is not None and point.high is not None:
            parts.append(
                _line(x, y_of(point.low), x, y_of(point.high), point.colour, 'stroke-width="2"')
            )
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y_of(point.value):.1f}" r="5" fill="{point.colour}"/></g>'
        )
        if step > 22 or place % math.ceil(22 / step) == 0:
            parts.append(_text(x, bottom + 18, str(place + 1)))
    parts.append(_text(LEFT, height - 4, unit, "start"))
    return _svg(height, title, parts)


def bars(points: Sequence[Point], title: str, unit: str) -> str:
    """Draw horizontal bars from zero, with the labels at the left and the values at the ends."""
    row, label_width = 26, 330
    height = row * len(points) + 30
    ends = [end for p in points for end in (p.value, p.high) if end is not None]
    low, high = min(0.0, *ends), max(0.0, *ends)
    scale = (WIDTH - label_width - 110) / ((high - low) or 1)
    zero = label_width + 45 - low * scale if low < 0 else label_width
    parts = [_line(zero, 4, zero, height - 26, GREY)]
    for place, point in enumerate(points):
        y = 6 + row * place
        start = min(zero, zero + point.value * scale)
        parts.append(
            f"<g><title>{escape(point.label)}</title>"
            f'<rect x="{start:.1f}" y="{y}" width="{abs(point.value) * scale:.1f}" height="16" '
            f'fill="{point.colour}" rx="2"/></g>'
        )
        if point.low is not None and point.high is not None:
            x1, x2 = zero + point.low * scale, zero + point.high * scale
            parts.append(_line(x1, y + 8, x2, y + 8, "#111827"))
        parts.append(_text(label_width - 8, y + 13, point.label[:52], "end"))
        end = zero + max(0.0, point.high if point.high is not None else point.value) * scale
        parts.append(_text(end + 8, y + 13, _number(point.value), "start"))
    parts.append(_text(label_width, height - 6, unit, "start"))
    return _svg(height, title, parts)
