"""The figures that are drawn from measured results."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import matplotlib
import pytest

from fedseal.report.plots import running_mean, spread
from fedseal.reproduce.cells import find_table, load_tables
from fedseal.reproduce.docs import FIGURE, MIXES, PRIVACY
from fedseal.reproduce.figures import draw_figure, draw_methods, draw_mixes, draw_privacy
from fedseal.reproduce.store import ResultStore

Draw = Callable[[ResultStore, Path], Path | None]
ROOT = Path(__file__).parents[2]
DRAWN_WITH = re.search(r"Matplotlib v([\d.]+)", (ROOT / FIGURE).read_text("utf-8"))
SAME_VERSION = DRAWN_WITH is not None and DRAWN_WITH[1] == matplotlib.__version__


def test_the_pages_show_their_figures() -> None:
    assert f"({MIXES})" in (ROOT / "README.md").read_text("utf-8")
    assert f"({FIGURE.name})" in (ROOT / "docs" / "results.md").read_text("utf-8")
    assert f"({PRIVACY.name})" in (ROOT / "docs" / "privacy.md").read_text("utf-8")


def test_a_figure_is_not_drawn_if_a_run_is_missing(tmp_path: Path) -> None:
    store = ResultStore(tmp_path)
    assert draw_figure(find_table("figure-theta"), store, "paper") is None
    assert draw_methods(store, tmp_path / "accuracy.svg") is None
    assert draw_mixes(store, tmp_path / "class-mix.svg") is None
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not SAME_VERSION, reason="another version of matplotlib draws other files")
@pytest.mark.parametrize(
    ("draw", "figure"), [(draw_methods, FIGURE), (draw_mixes, MIXES), (draw_privacy, PRIVACY)]
)
def test_figures_are_drawn_from_the_results(draw: Draw, figure: Path, tmp_path: Path) -> None:
    drawn = draw(ResultStore(ROOT / "results"), tmp_path / figure.name)
    assert drawn is not None and drawn.read_bytes() == (ROOT / figure).read_bytes(), "run: make docs"


@pytest.mark.parametrize("name", [name for name in load_tables() if name.startswith("figure-")])
def test_the_data_of_a_figure_are_those_of_the_results(name: str, tmp_path: Path) -> None:
    results = shutil.copytree(ROOT / "results", tmp_path / "results")
    before = (results / name / "figure.json").read_bytes()
    path = draw_figure(find_table(name), ResultStore(results), "paper")
    assert path is not None and path.with_suffix(".json").read_bytes() == before


def test_labels_are_moved_apart() -> None:
    """Two labels at 5 move by half the distance each; a label far away stays."""
    assert spread({"a": 5.0, "b": 5.0, "far": 9.0}, 1.0) == pytest.approx({"a": 4.5, "b": 5.5, "far": 9.0})
    places = spread({"a": 1.0, "b": 1.1, "c": 1.2}, 0.5)
    assert list(places) == ["a", "b", "c"]
    assert places["b"] - places["a"] == pytest.approx(0.5) and places["c"] - places["b"] == pytest.approx(0.5)


def test_the_running_mean_has_ten_rounds() -> None:
    means = running_mean([float(value) for value in range(12)])
    assert means[:2] == [0.0, 0.5] and means[9] == 4.5 and means[11] == 6.5
