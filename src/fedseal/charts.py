"""Figures as HTML and SVG text, which take their colours from the style of the page that they are in."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedseal.data.pool import Pixels

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 12, 36  # margins around the plot
COLOURS = 10  # in the report's style

Points = Sequence[tuple[float, float]]
Floats = npt.NDArray[np.float64]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between two bounds, some `about` of them."""
    rough = (high - low) / about or 1.0
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def lines(series: Mapping[str, Points], *, percent: bool = False) -> str:
    """A line by round for each series, with a legend below. What the first twentieth is like does not set the
    scale: a line that starts far off comes in from outside."""
    shown = {name: points for name, points in series.items() if points}
    xs = [px for points in shown.values() for px, _ in points]
    x0, x1 = bounds(xs)
    settled = x0 + (x1 - x0) / 20
    y0, y1 = bounds([py for points in shown.values() for px, py in points if px >= settled])

    def at(px: float, py: float) -> tuple[float, float]:
        across = LEFT + (px - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (y1 - py) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts, drawn = [], []
    for value in ticks(y0, y1):
        _, row = at(x0, value)
        label = f"{value:.0%}" if percent and y1 - y0 >= 0.03 else f"{value:.1%}" if percent else f"{value:g}"
        parts.append(f'<path class="grid" d="M{LEFT} {row:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{row + 4:.1f}" text-anchor="end">{label}</text>')
    for value in ticks(x0, x1, 8):
        if value == round(value):
            column, _ = at(value, y0)
            parts.append(f'<text x="{column:.1f}" y="{HEIGHT - 16}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">round</text>')
    for number, (name, points) in enumerate(shown.items()):
        path = "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in points)
        colour = f"c{number % COLOURS}"
        drawn.append(f'<path class="{colour} line" d="M{path}"><title>{escape(name)}</title></path>')
        across, down = at(*points[-1])
        parts.append(f'<circle class="{colour} dot" cx="{across:.1f}" cy="{down:.1f}" r="3"/>')
    inside = LEFT - 2, TOP - 2, WIDTH - LEFT - RIGHT + 4, HEIGHT - TOP - BOTTOM + 4
    place = 'x="{}" y="{}" width="{}" height="{}" viewBox="{} {} {} {}"'.format(*inside, *inside)
    parts.append(f"<svg {place}>{''.join(drawn)}</svg>")  # cuts off what is outside
    return svg(parts) + legend(list(shown))


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest, a little apart in any case."""
    low, high = min(values), max(values)
    return (low, high) if high - low > 1e-9 else (low - 0.5, high + 0.5)


def reliability(confidence: Floats, share: Floats, right: Floats) -> str:
    """A bar a bin: how often the model is right where it is so sure; the diagonal is honest.

    `confidence` are the bins' upper ends, `share` how many of the images are in each.
    """
    parts, count = [], len(confidence)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        row = TOP + (1 - value) * high
        parts.append(f'<path class="grid" d="M{LEFT} {row:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{row + 4:.1f}" text-anchor="end">{value:.0%}</text>')
        column = LEFT + value * wide
        parts.append(f'<text x="{column:.1f}" y="{HEIGHT - 16}" text-anchor="middle">{value:.0%}</text>')
    for i in range(count):
        if share[i] > 0:
            tall = right[i] * high
            title = f"up to {confidence[i]:.0%} sure: {share[i]:.1%} of images, {right[i]:.1%} right"
            parts.append(
                f'<rect class="c0 bar" x="{LEFT + i / count * wide + 2:.1f}" y="{TOP + high - tall:.1f}"'
                f' width="{wide / count - 4:.1f}" height="{tall:.1f}"><title>{title}</title></rect>'
            )
    parts.append(f'<path class="diagonal" d="M{LEFT} {TOP + high}L{WIDTH - RIGHT} {TOP}"/>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">confidence</text>')
    return svg(parts)


def matrix(values: Floats, rows: Sequence[str], columns: Sequence[str], corner: str) -> str:
    """Numbers in a table, the larger in their row the darker."""
    head = "".join(f"<th scope=col><span>{escape(name)}</span></th>" for name in columns)
    lines = [f"<tr><th>{escape(corner)}</th>{head}</tr>"]
    for name, row in zip(rows, values, strict=True):
        most = max(float(row.max()), 1e-9)
        cells = "".join(f'<td style="--v:{value / most:.3f}">{value:g}</td>' for value in row)
        lines.append(f"<tr><th scope=row>{escape(name)}</th>{cells}</tr>")
    return f'<div class="scroll"><table class="matrix">{"".join(lines)}</table></div>'


def picture(pixels: Pixels) -> str:
    """One image [C, H, W] as an <img>."""
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, -1))
    file = io.BytesIO()
    image.save(file, "png")
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'


def svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def legend(names: Sequence[str]) -> str:
    items = "".join(
        f'<li><i class="c{number % COLOURS}"></i>{escape(name)}</li>' for number, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'
