import re

import pytest

from fedseal.report import charts


def test_ticks_are_round_numbers() -> None:
    assert charts.ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert charts.ticks(1, 150, 8) == pytest.approx([20, 40, 60, 80, 100, 120, 140])
    assert charts.ticks(0.71, 0.83) == pytest.approx([0.75, 0.8])
    assert charts.bounds([3.0, 3.0]) == (2.5, 3.5)


def test_a_line_goes_from_corner_to_corner() -> None:
    """Points (2, 0.5) and (3, 1) are at the bottom and the upper right; the margins are 56, 24, 12, 36."""
    text = charts.line_chart({"a<": [(1, 0.0), (2, 0.5), (3, 1.0)]})
    [path] = re.findall(r'line" d="M([^"]*)"', text)
    points = [tuple(map(float, point.split())) for point in path.split("L")]
    # The first point does not affect the scale: it is as far below the plot as the plot is high.
    assert points == [(56.0, 516.0), (336.0, 264.0), (616.0, 12.0)]
    clipped = '<svg x="54" y="10" width="564" height="256" viewBox="54 10 564 256"><path'
    assert clipped in text
    assert "<title>a&lt;</title>" in text
