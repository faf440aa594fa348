"""Panels with axes, legends, and the SVG around them: what `procedures.py` draws with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 720
HEIGHT = 330
TOP, BOTTOM = 62, 284
#: From where to where a panel reaches: alone, or two side by side.
WIDE, LEFT, RIGHT = (52, 704), (52, 340), (412, 704)

STYLE = """
:root { color-scheme: light dark; }
.page { fill: #fff; }
text { font: 14px system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; fill: #1f2733; }
.title { font-weight: 600; }
.small { font-size: 12.5px; fill: #55637a; }
.axis { stroke: #c3ccda; fill: none; }
.pruned { fill: #cbd5e4; stroke: #aebbd0; } .complete { fill: #5b8bd0; stroke: #5b8bd0; }
.best { fill: #d9822b; stroke: #d9822b; } .second { fill: #4f9d58; stroke: #4f9d58; }
.third { fill: #8a63b8; stroke: #8a63b8; }
path, circle { stroke: none; } polyline { fill: none !important; stroke-width: 1.5; }
polyline.best { stroke-width: 2.6; } .copy { fill: none; stroke: #4f9d58; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  .page { fill: #1e2430; } text { fill: #e7ecf4; } .small { fill: #a9b6ca; }
  .axis { stroke: #465268; } .pruned { fill: #485469; stroke: #5d6a82; }
  .complete { fill: #6c9fe6; stroke: #6c9fe6; } .best { fill: #f2a04a; stroke: #f2a04a; }
  .second { fill: #6dbb76; stroke: #6dbb76; } .third { fill: #ac8bd6; stroke: #ac8bd6; }
  .copy { stroke: #6dbb76; }
}
"""


def coordinate(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


@dataclass(frozen=True)
class Panel:
    """A part of a picture with two axes.

    Parameters
    ----------
    where
        From where to where it reaches.
    x, y
        The values at the ends of the axes; those of y from the bottom to the top.
    log
        Whether x is a logarithm.
    """

    where: tuple[int, int]
    x: tuple[float, float]
    y: tuple[float, float]
    log: bool = False

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return where a pair of values lies in the picture."""
        (left, right), (low, high) = self.where, self.x
        if self.log:
            x, low, high = math.log(x), math.log(low), math.log(high)
        share = (y - self.y[0]) / (self.y[1] - self.y[0])
        return left + (x - low) / (high - low) * (right - left), BOTTOM - share * (BOTTOM - TOP)

    def place(self, x: float, y: float) -> str:
        return ",".join(map(coordinate, self.at(x, y)))

    def frame(self, title: str, x: str, ticks: Iterable[float], y: str = "") -> Iterator[str]:
        """Draw the axes, what they are called and numbers below."""
        left, right = self.where
        yield f'<path class="axis" style="stroke:" d="M{left} {TOP}V{BOTTOM}H{right}"/>'
        yield f'<text class="title" x="{left}" y="{TOP - 38}">{escape(title)}</text>'
        if y:
            yield f'<text class="small" x="{left}" y="{TOP - 8}">{escape(y)}</text>'
        for tick in ticks:
            place = coordinate(self.at(tick, self.y[0])[0])
            yield (
                f'<text class="small" x="{place}" y="{BOTTOM + 18}" '
                f'text-anchor="middle">{tick:g}</text>'
            )
        yield (
            f'<text class="small" x="{(left + right) // 2}" y="{BOTTOM + 37}" '
            f'text-anchor="middle">{escape(x)}</text>'
        )

    def levels(self, ticks: Iterable[float]) -> Iterator[str]:
        """Write numbers beside the y axis."""
        yield from self._beside((tick, tick) for tick in ticks)

    def powers(self, exponents: Iterable[int]) -> Iterator[str]:
        """Write powers of ten beside the y axis, where y is their exponent."""
        yield from self._beside((exponent, 10.0**exponent) for exponent in exponents)

    def _beside(self, numbers: Iterable[tuple[float, float]]) -> Iterator[str]:
        for level, number in numbers:
            x, y = self.at(self.x[0], level)
            place = f'x="{coordinate(x - 6)}" y="{coordinate(y + 4.5)}"'
            yield f'<text class="small" {place} text-anchor="end">{number:g}</text>'

    def bar(self, kind: str, start: float, stop: float, low: float, high: float) -> str:
        (x, bottom), (right, top) = self.at(start, low), self.at(stop, high)
        size = f'width="{coordinate(right - x)}" height="{coordinate(bottom - top)}"'
        place = f'x="{coordinate(x)}" y="{coordinate(top)}"'
        return f'<rect class="{kind}" style="stroke:none" {place} {size}/>'


def legend(kinds: Sequence[tuple[str, str]], left: int) -> Iterator[str]:
    """Say what the colours mean, in the line above a panel."""
    for kind, words in kinds:
        yield f'<rect class="{kind}" x="{left}" y="{TOP - 19}" width="11" height="11" rx="2"/>'
        yield f'<text class="small" x="{left + 16}" y="{TOP - 9}">{escape(words)}</text>'
        left += 30 + round(6.4 * len(words))


def picture(name: str, words: str, parts: Iterable[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'aria-labelledby="t">',
            f'<title id="t">{escape(f"{name}: {words}")}</title>',
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
            *parts,
            "</svg>\n",
        ]
    )


def ticks_until(end: float) -> list[float]:
    """Return three to six round numbers from 0 on."""
    step = next(
        scale * size
        for scale in (0.01, 0.1, 1, 10, 100, 1000)
        for size in (1, 2, 5)
        if end / (scale * size) < 6
    )
    return [step * n for n in range(int(end / step + 1e-9) + 1)]
