"""The report: what it shows, that it needs nothing from elsewhere, and that a browser draws it."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import TINY, Command
from fedseal import api, charts, report
from fedseal.errors import UserError

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = """<script>
addEventListener("load", () => {
  const found = [...document.querySelectorAll("svg, .matrix, img, path.line, rect.bar")].map(e => {
    const box = e.getBoundingClientRect();
    return [e.tagName.toLowerCase(), box.width, box.height, e.tagName == "IMG" ? e.naturalWidth : 1];
  });
  document.body.dataset.found = JSON.stringify({found, wide: document.documentElement.scrollWidth});
});
</script>"""


def browse(path: Path, folder: Path, width: int) -> dict[str, Any]:
    """The boxes that a browser gives to all figures; fails if it complains about anything."""
    assert CHROMIUM is not None
    probed = folder / "probed.html"
    probed.write_text(path.read_text("utf-8").replace("</body>", PROBE + "</body>"), "utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"]
    flags += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *flags, probed.as_uri()], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    [found] = re.findall(r'data-found="([^"]*)"', done.stdout)
    seen: dict[str, Any] = json.loads(html.unescape(found))
    return seen


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: install Debian's package chromium")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_draws_every_figure(width: int, finished: Path, tmp_path: Path) -> None:
    seen = browse(finished / "report.html", tmp_path, width)
    kinds = [kind for kind, *_ in seen["found"]]
    assert kinds.count("svg") >= 5 and kinds.count("table") == 2 and kinds.count("img") >= 12
    assert kinds.count("path") >= 10 and kinds.count("rect") >= 1
    for kind, wide, high, natural in seen["found"]:
        assert natural > 0 and (wide > 0 or high > 0), kind
        assert kind in ("path", "rect") or (wide > 20 and high > 20), kind
    assert seen["wide"] <= max(width, 500)  # nothing sticks out of a phone's screen (Chromium's least is 500)


def test_it_needs_nothing_from_elsewhere(finished: Path) -> None:
    text = (finished / "report.html").read_text("utf-8")
    assert not re.search(r"<script|<link|@import|(src|href)=.?https?:|url\(", text)
    for title in ("Accuracy by round", "Thresholds τ by class", "Right labels", "The clients' images"):
        assert f"<h2>{title}" in text.replace("&#x27;", "'")
    for title in ("Confusion on the test", "Calibration", "Images of the clients", "Repeat"):
        assert f"<h2>{title}" in text
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    assert "fedseal train" in text and "bootstrap_epochs" in text  # to repeat it


def test_the_numbers_are_the_runs(finished: Path) -> None:
    text = (finished / "report.html").read_text("utf-8")
    summary = json.loads((finished / "summary.json").read_text("utf-8"))
    assert f"{summary['test_accuracy']['mean_last_10']:.2%}" in text and summary["split"] in text
    cells = re.findall(r'<td style="--v:[\d.]+">([\d.]+)</td>', text)
    mix, confusion = np.array(cells[:30], float), np.array(cells[30:], float).reshape(10, 10)
    assert mix.sum() == 3 * TINY["data.images_per_client"]
    assert confusion.sum() == TINY["data.held_out_test"]
    assert np.trace(confusion) / confusion.sum() == pytest.approx(summary["test_accuracy"]["last"])


@pytest.mark.parametrize("judged", ["model", "average"])
def test_both_models_are_shown_by_their_names(judged: str, tiny: dict[str, Any], tmp_path: Path) -> None:
    run = api.train("demo", out=tmp_path / "run", set=tiny | {"evaluate": judged})
    text = (run.folder / "report.html").read_text("utf-8")
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text("utf-8").splitlines()]
    for key, name in (("test_accuracy", "test, wᵗ"), ("average_accuracy", "test, w̄")):
        measured = f"{np.mean([event[key] for event in events]):.2%}"
        assert f"<td>{name}</td><td>{measured}</td>" in text
        if (judged == "average") == key.startswith("average"):
            assert f"Judged by: test {measured}, {report.MODELS[judged]}".replace("'", "&#x27;") in text


def test_names_of_classes_are_text(own: dict[str, Any], shapes: Path, tmp_path: Path) -> None:
    """A folder called like a tag does not become one; and own folders have reports, too."""
    for part in ("server", "test"):
        (shapes / part / "circle").rename(shapes / part / "<b>&round")
    run = api.train("folders", out=tmp_path / "run", set=own | {"data.path": str(shapes)})
    text = (run.folder / "report.html").read_text("utf-8")
    assert "&lt;b&gt;&amp;round" in text and "<b>&round" not in text
    assert "<th>client</th><th>images</th>" in text  # nobody knows the clients' labels
    assert "fedseal train" in text
    (shapes / "server").rename(shapes / "labels")  # as where only the labels are: a run that was served
    text = api.write_report([run.folder]).read_text("utf-8")
    assert "fedseal train" not in text and "--test DIR" in text


def test_several_runs_beside_each_other(
    finished: Path, tiny: dict[str, Any], fedseal: Command, tmp_path: Path
) -> None:
    other = api.train("demo", out=tmp_path / "other", set={**tiny, "method": "semifl", "seed": 1}).folder
    page = tmp_path / "both.html"
    assert fedseal("report", finished, other, "--out", page).code == 0
    text = page.read_text("utf-8")
    assert "fedseal, seed 0" in text and "semifl, seed 1" in text and "different splits" in text
    assert fedseal("report", other).code == 0
    assert "Accuracy by round" in (other / "report.html").read_text("utf-8")


def test_what_is_no_run_is_named(fedseal: Command, copy: Path, tmp_path: Path) -> None:
    fedseal("report", tmp_path / "none").refuses(f"{tmp_path / 'none'} is no run folder")
    (copy / "summary.json").write_text("{}")
    fedseal("report", copy).refuses(f"{copy} is no finished run")
    with pytest.raises(UserError, match="no finished run"):
        api.write_report([copy, copy], tmp_path / "both.html")
    assert not (tmp_path / "both.html").exists()


def test_a_report_goes_where_it_is_told(fedseal: Command, copy: Path, tmp_path: Path) -> None:
    (copy / "report.html").unlink()
    assert fedseal("report", copy, "--out", tmp_path / "one.html").code == 0
    assert "Confusion" in (tmp_path / "one.html").read_text("utf-8") and not (copy / "report.html").exists()
    (copy / "events.jsonl").write_text("7\n")
    fedseal("report", copy).refuses(f"{copy / 'events.jsonl'} is missing or damaged")


def test_numbers_that_were_kept_without_their_model_have_a_report(fedseal: Command, copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert fedseal("report", copy).code == 0
    text = (copy / "report.html").read_text("utf-8")
    assert "Thresholds τ by class" in text and "Ankle boot" in text and "Confusion" not in text


def test_ticks_are_round_numbers() -> None:
    assert charts.ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert charts.ticks(1, 150, 8) == pytest.approx([20, 40, 60, 80, 100, 120, 140])
    assert charts.ticks(0.71, 0.83) == pytest.approx([0.75, 0.8])
    assert charts.bounds([3.0, 3.0]) == (2.5, 3.5)


def test_a_line_goes_from_corner_to_corner() -> None:
    """Points (2, 0.5) and (3, 1) are at its bottom and its upper right: its margins are 56, 24, 12, 36."""
    text = charts.lines({"a<": [(1, 0.0), (2, 0.5), (3, 1.0)]})
    [path] = re.findall(r'line" d="M([^"]*)"', text)
    points = [tuple(map(float, point.split())) for point in path.split("L")]
    # the first point is not what the scale is set by: it lies as far below the plot as the plot is high
    assert points == [(56.0, 516.0), (336.0, 264.0), (616.0, 12.0)]
    assert (
        '<svg x="54" y="10" width="564" height="256" viewBox="54 10 564 256"><path' in text
    )  # cut off there
    assert "<title>a&lt;</title>" in text


def test_confusion_and_calibration() -> None:
    """Four images of two classes, 0.95, 0.91, 0.65 and 0.85 sure, seen as 0, 1, 0, 1; they are 0, 0, 0, 1.

    The bin up to 1 has the first two: one right of two, 0.93 sure on average: off by 0.43. The bins up to 0.7
    and 0.9 have one each, both right: off by 0.35 and 0.15. The expected error is 0.5 · 0.43 + 0.25 · (0.35 +
    0.15) = 0.34.
    """
    probs = np.array([[0.95, 0.05], [0.09, 0.91], [0.65, 0.35], [0.15, 0.85]])
    labels = np.array([0, 0, 0, 1])
    assert report.confusion(probs, labels).tolist() == [[2, 1], [0, 1]]
    share, right, error = report.calibration(probs, labels)
    assert share.tolist() == [0, 0, 0, 0, 0, 0, 0.25, 0, 0.25, 0.5]
    assert right[[6, 8, 9]].tolist() == [1, 1, 0.5]
    assert error == pytest.approx(0.34)
