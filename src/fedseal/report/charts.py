"""Charts as HTML and SVG text; the colours come from the page's style sheet."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedseal.data.pool import Pixels

WIDTH, HEIGHT = 640, 328
LEFT, RIGHT, TOP, BOTTOM = 80, 36, 20, 68  # margins around the plot, for a phone's large text
COLOURS = 10  # in report.css

Points = Sequence[tuple[float, float]]
Floats = npt.NDArray[np.float64]


def line_chart(series: Mapping[str, Points], *, percent: bool = False) -> str:
    """A line by round for each series, with a legend below. The axes span all points."""
    shown = {name: points for name, points in series.items() if points}
    x0, x1 = bounds([px for points in shown.values() for px, _ in points])
    y0, y1 = bounds([py for points in shown.values() for _, py in points])

    def place(px: float, py: float) -> tuple[float, float]:
        x = LEFT + (px - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return x, TOP + (y1 - py) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for value in ticks(y0, y1):
        _, y = place(x0, value)
        label = format_tick(value) if not percent else f"{value:.0%}" if y1 - y0 >= 0.03 else f"{value:.1%}"
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value in ticks(x0, x1, 8):
        if value == round(value):
            x, _ = place(value, y0)
            label = format_tick(value)
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 36}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">round</text>')
    for number, (name, points) in enumerate(shown.items()):
        path = "L".join("{:.1f} {:.1f}".format(*place(*point)) for point in points)
        colour = f"c{number % COLOURS}"
        parts.append(f'<path class="{colour} line" d="M{path}"><title>{escape(name)}</title></path>')
        x, y = place(*points[-1])
        parts.append(f'<circle class="{colour} dot" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
    return svg(parts) + legend(list(shown))


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """About this number of round values between two bounds."""
    rough = (high - low) / about or 1.0
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def format_tick(value: float) -> str:
    """A short label of an axis: 20000 is "20k"."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest value, or an interval around them if they are equal."""
    low, high = min(values), max(values)
    around = max(0.5, 1e-6 * abs(low))
    return (low, high) if high - low > 1e-9 * around else (low - around, high + around)


def reliability_chart(confidence: Floats, share: Floats, correct: Floats) -> str:
    """The share of correct predictions by confidence; a calibrated model is on the diagonal.

    `confidence` has the upper bounds of the bins, `share` the share of all images in each bin.
    """
    parts, count = [], len(confidence)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + (1 - value) * height
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.0%}</text>')
        x = LEFT + value * width
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 36}" text-anchor="middle">{value:.0%}</text>')
    for i in range(count):
        if share[i] > 0:
            bar = correct[i] * height
            title = (
                f"confidence up to {confidence[i]:.0%}: {share[i]:.1%} of images, {correct[i]:.1%} correct"
            )
            parts.append(
                f'<rect class="c0 bar" x="{LEFT + i / count * width + 2:.1f}" y="{TOP + height - bar:.1f}"'
                f' width="{width / count - 4:.1f}" height="{bar:.1f}"><title>{title}</title></rect>'
            )
    parts.append(f'<path class="diagonal" d="M{LEFT} {TOP + height}L{WIDTH - RIGHT} {TOP}"/>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">confidence</text>')
    return svg(parts)


def matrix(values: Floats, rows: Sequence[str], columns: Sequence[str], corner: str) -> str:
    """A table of numbers; the largest number of a row is the darkest."""
    head = "".join(f"<th scope=col><span>{escape(name)}</span></th>" for name in columns)
    lines = [f"<tr><th>{escape(corner)}</th>{head}</tr>"]
    for name, row in zip(rows, values, strict=True):
        largest = max(float(row.max()), 1e-9)
        cells = "".join(f'<td style="--v:{value / largest:.3f}">{value:g}</td>' for value in row)
        lines.append(f"<tr><th scope=row>{escape(name)}</th>{cells}</tr>")
    return f'<div class="scroll"><table class="matrix">{"".join(lines)}</table></div>'


def picture(pixels: Pixels) -> str:
    """An image [C, H, W] as an <img> element."""
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, -1))
    file = io.BytesIO()
    image.save(file, "png")
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'


def svg(parts: Sequence[str]) -> str:
    """A drawing of the charts' size."""
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def legend(names: Sequence[str]) -> str:
    """The names of the series beside their colours."""
    items = "".join(
        f'<li><i class="c{number % COLOURS}"></i>{escape(name)}</li>' for number, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'
