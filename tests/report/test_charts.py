import re

import pytest

from fedseal.report import charts


def test_ticks_are_round_numbers() -> None:
    assert charts.ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert charts.ticks(1, 150, 8) == pytest.approx([20, 40, 60, 80, 100, 120, 140])
    assert charts.ticks(0.71, 0.83) == pytest.approx([0.75, 0.8])
    assert charts.bounds([3.0, 3.0]) == (2.5, 3.5)
    low, high = charts.bounds([1e17, 1e17])
    assert low < 1e17 < high


def test_a_line_goes_from_corner_to_corner() -> None:
    """The margins are 80, 36, 20 and 68, so the plot is 524 wide and 240 high. No point is outside of it."""
    text = charts.line_chart({"a<": [(1, 0.0), (2, 0.5), (101, 1.0)]})
    [path] = re.findall(r'line" d="M([^"]*)"', text)
    points = [tuple(map(float, point.split())) for point in path.split("L")]
    assert points == [(80.0, 260.0), (85.2, 140.0), (604.0, 20.0)]
    assert "<title>a&lt;</title>" in text


def test_labels_of_an_axis_are_short() -> None:
    labels = [charts.format_tick(value) for value in (0, 0.25, 2000, 10_000, 12_500, 1_000_000, -20_000)]
    assert labels == ["0", "0.25", "2000", "10k", "12.5k", "1M", "-20k"]
