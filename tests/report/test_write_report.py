"""The report of a run: what it shows, and that it needs nothing from elsewhere."""

import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import TINY, Command, settings
from fedseal.errors import UserError
from fedseal.report import titles, write
from fedseal.storage.events_file import format_lines, read_events
from fedseal.system.environment import AVX2
from fedseal.training.train import train

SOURCE = Path(write.__file__).parent

METHOD = """
import torch
from fedseal.methods.fedavg import FedAvg

class Careful(FedAvg):
    titles = {"chosen": "chosen ★", "heat": "temperature T", "shares": "shares <π>"}

    def train_client(self, client, request):
        rows = torch.arange(20)
        client.record_labels("chosen", rows, torch.zeros_like(rows))
        return request.tensors["model"], {"chosen": len(rows), "spare_parts": 3}

    def metrics(self, state):
        return {"heat": 0.25, "shares": [m / 10 for m in range(10)]}

    def explain_labels(self, memory, metrics, predict):
        assert metrics == {"chosen": 60, "spare_parts": 9, **self.metrics(None)}
        assert not memory.tensors and not memory.scalars
        confidences = predict()
        first = torch.arange(len(confidences)) < 2
        return confidences, {"the first <two>": first, "the others": ~first, "none": first & ~first}
"""


def sections(path: Path) -> dict[str, str]:
    """A page's sections by heading."""
    found = re.findall(r"<section><h2>(.*?)</h2>(.*?)</section>", path.read_text("utf-8"), re.DOTALL)
    return {unescape(heading): content for heading, content in found}


def legend(content: str) -> list[str]:
    """The titles of a chart's lines."""
    return [unescape(title) for title in re.findall(r'<li><i class="c\d"></i>(.*?)</li>', content)]


def test_it_needs_nothing_from_elsewhere(finished: Path) -> None:
    text = (finished / "report.html").read_text("utf-8")
    assert not re.search(r"<script|<link|@import|(src|href)=.?https?:|url\(", text)
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    found = sections(finished / "report.html")
    for heading in ("Accuracy by round", "Thresholds τ by class", "Correct labels", "Client images"):
        assert heading in found
    for heading in ("Confusion on the test images", "Calibration on the test images"):
        assert heading in found
    assert "Client images with the labels that the method gives them" in found
    repeat = found["Reproduce: fedseal, seed 0"]
    assert "fedseal train" in repeat and "bootstrap_epochs" in repeat


def test_the_numbers_are_the_runs(finished: Path) -> None:
    text = (finished / "report.html").read_text("utf-8")
    summary = json.loads((finished / "summary.json").read_text("utf-8"))
    assert f"{summary['test_accuracy']['mean_last_10']:.2%}" in text and summary["split"] in text
    cells = re.findall(r'<td style="--v:[\d.]+">([\d.]+)</td>', text)
    mix, confusion = np.array(cells[:30], float), np.array(cells[30:], float).reshape(10, 10)
    assert mix.sum() == 3 * TINY["data.images_per_client"]
    assert confusion.sum() == TINY["data.held_out_test"]
    assert np.trace(confusion) / confusion.sum() == pytest.approx(summary["test_accuracy"]["last"])


def test_the_methods_numbers_have_its_titles(finished: Path) -> None:
    found = sections(finished / "report.html")
    assert legend(found["Images that clients learn from"]) == ["D⁺", "D⁻"]
    assert legend(found["Correct labels"]) == ["D⁺", "D⁻"]
    assert legend(found["λ by round"]) == ["λ"]
    assert legend(found["Thresholds τ by class"])[-1] == "Ankle boot"
    examples = unescape(found["Client images with the labels that the method gives them"])
    assert re.findall(r"<h3>(.*?)</h3>", examples) == [
        "learned as this class (D⁺)",
        "learned as not another class (D⁻)",
    ]


def test_an_unknown_method_shows_its_numbers_by_itself(
    tiny: dict[str, Any], finished: Path, tmp_path: Path
) -> None:
    """Three clients choose 20 images each, and count 3 more; six clients' images are shown per group."""
    (tmp_path / "careful.py").write_text(METHOD)
    options = tiny | {"method": f"{tmp_path / 'careful.py'}:Careful"}
    run = train("fmnist-lenet", out=tmp_path / "run", options=options).folder
    found = sections(run / "report.html")
    assert legend(found["Images that clients learn from"]) == ["chosen ★", "spare parts"]
    assert legend(found["Correct labels"]) == ["chosen ★"]
    assert legend(found["Temperature T by round"]) == ["temperature T"]
    assert legend(found["Shares <π> by class"])[0] == "T-shirt/top"
    examples = found["Client images with the labels that the method gives them"]
    groups = examples.split("<h3>")[1:]
    assert [group.split("</h3>")[0] for group in groups] == ["the first &lt;two&gt;", "the others"]
    assert [group.count("<figure") for group in groups] == [3 * 2, 3 * 4]

    found = sections(write.compare_runs([run, finished], tmp_path / "both.html"))
    names = [f"{name}, seed 0 ({folder.name})" for name, folder in (("Careful", run), ("fedseal", finished))]
    if run.name == finished.name:
        names = [f"Careful, seed 0 ({run})", f"fedseal, seed 0 ({finished})"]
    first, second = names
    counts = [f"{first}, chosen ★", f"{first}, spare parts", f"{second}, D⁺", f"{second}, D⁻"]
    assert legend(found["Images that clients learn from"]) == counts
    assert legend(found["Correct labels"]) == [f"{first}, chosen ★", f"{second}, D⁺", f"{second}, D⁻"]
    assert legend(found["Temperature T by round"]) == [first] and legend(found["λ by round"]) == [second]
    assert f"Shares <π> by class: {first}" in found and f"Thresholds τ by class: {second}" in found


def test_symbols_are_explained_below_their_charts(finished: Path, tmp_path: Path) -> None:
    page = write.compare_runs([finished, finished], tmp_path / "both.html")
    for found in (sections(finished / "report.html"), sections(page)):
        text = {heading: unescape(content) for heading, content in found.items()}
        by_round = "".join(content for heading, content in text.items() if "Accuracy by round" in heading)
        assert "<li>wᵗ: the global model in round t" in by_round and "<li>w̄: the average of the" in by_round
        assert text["Images that clients learn from"].count("<li>D⁺: images whose label a client trusts") == 1
        assert "<li>D⁻: other images" in text["Images that clients learn from"]
        [tau] = {content for heading, content in text.items() if heading.startswith("Thresholds τ by class")}
        assert "<li>τ: the confidence that a client's label needs" in tau
        assert "<li>λ: the weight of the loss on D⁺" in text["λ by round"]


def test_skipped_files_and_clients_left_out_are_named_with_reasons(
    own: dict[str, Any], shapes: Path, tmp_path: Path
) -> None:
    (shapes / "clients" / "north" / "<b>.png").write_text("not an image")
    run = train("folders", out=tmp_path / "run", options=own).folder
    path = run / "events.jsonl"
    first, second = read_events(path)
    lines = [{"event": "left-out", "t": t, "client": "<south>", "reason": "it is > late"} for t in (1, 2)]
    path.write_text(format_lines([lines[0], first, lines[1], second])[0])
    found = sections(write.rewrite_report(run))["Problems"]
    assert "<td>&lt;south&gt;</td><td>1–2</td><td>it is &gt; late</td>" in found
    assert "/clients/north/&lt;b&gt;.png</td><td>not a readable image (unknown format)</td>" in found
    assert "Skipped files (1)" in found


def test_names_of_files_need_not_be_utf_8(own: dict[str, Any], shapes: Path, tmp_path: Path) -> None:
    """In another process, because pytest cannot show such names."""
    (shapes / "clients" / os.fsdecode(b"north/caf\xe9.png")).write_text("a name in Latin-1")
    words = [*("train", "folders", "--out", tmp_path / "run", "--log", tmp_path / "log"), *settings(own)]
    done = subprocess.run([sys.executable, "-m", "fedseal", *map(str, words)], capture_output=True)
    assert done.returncode == 0, done.stderr
    for path in (tmp_path / "run" / "report.html", tmp_path / "log"):
        assert "caf\\udce9.png" in path.read_text("utf-8")


def test_other_images_are_refused(own: dict[str, Any], shapes: Path, tmp_path: Path) -> None:
    run = train("folders", out=tmp_path / "run", options=own).folder
    before = (run / "report.html").read_bytes()
    shutil.copy(shapes / "test" / "circle" / "0.png", shapes / "server" / "circle" / "new.png")
    with pytest.raises(UserError, match="The data have changed since the run"):
        write.rewrite_report(run)
    assert (run / "report.html").read_bytes() == before


def test_comparing_runs_does_not_need_their_networks(own_network: Path, tmp_path: Path) -> None:
    keys = {**TINY, "model.name": f"{own_network}:build", "rounds": 1}
    run = train("fmnist-lenet", out=tmp_path / "run", options=keys).folder
    own_network.write_text("changed")
    text = write.compare_runs([run], tmp_path / "comparison.html").read_text("utf-8")
    assert "T-shirt/top" in text


def test_an_unfinished_continuation_is_mentioned(copy: Path, fedseal: Command) -> None:
    config = copy / "config.toml"
    config.write_text(config.read_text("utf-8").replace("rounds = 2\n", "rounds = 300\n", 1), "utf-8")
    assert fedseal("report", copy).code == 0
    text = (copy / "report.html").read_text("utf-8")
    assert "a continuation to 300 rounds has not finished" in text and "--set rounds=2" in text
    assert "mean of the last 2 rounds" in text


def test_a_run_without_problems_has_no_such_section(finished: Path) -> None:
    assert "Problems" not in sections(finished / "report.html")


def test_the_report_knows_no_method() -> None:
    for path in SOURCE.glob("*.py"):
        text = path.read_text("utf-8")
        assert not re.search(r"\b(tau|positive|negative|confident)\b|FedSEAL|fedseal\.paper", text), path


def test_a_new_accuracy_shows_up_by_itself(copy: Path) -> None:
    path = copy / "events.jsonl"
    path.write_text(format_lines(event | {"night_accuracy": 0.5} for event in read_events(path))[0])
    summary = json.loads((copy / "summary.json").read_text("utf-8"))
    summary["night_accuracy"] = summary["test_accuracy"] | {"mean_last_10": 0.5}
    (copy / "summary.json").write_text(json.dumps(summary), "utf-8")
    found = sections(write.rewrite_report(copy))
    assert "<td>night, wᵗ</td><td>50.00%</td>" in found["Accuracy"]
    assert "night, wᵗ" in legend(found["Accuracy by round"])
    found = sections(write.compare_runs([copy], copy / "comparison.html"))
    assert "<th>night, wᵗ</th>" in found["Accuracy"] and "Accuracy by round: night, wᵗ" in found


@pytest.mark.parametrize("judged", ["model", "average"])
def test_both_models_are_shown_by_their_names(judged: str, tiny: dict[str, Any], tmp_path: Path) -> None:
    run = train("fmnist-lenet", out=tmp_path / "run", options=tiny | {"evaluate": judged})
    text = unescape((run.folder / "report.html").read_text("utf-8"))
    events = read_events(run.folder / "events.jsonl")
    for key, name in (("test_accuracy", "test, wᵗ"), ("average_test_accuracy", "test, w̄")):
        measured = f"{np.mean([event[key] for event in events]):.2%}"
        assert f"<td>{name}</td><td>{measured}</td>" in text
        if (judged == "average") == key.startswith("average"):
            assert f"Result: {measured} on the test images ({titles.MODELS[judged]})" in text


def test_names_of_classes_are_text(own: dict[str, Any], shapes: Path, tmp_path: Path) -> None:
    """A folder named like a tag does not become one; and own folders have reports, too."""
    for part in ("server", "test"):
        (shapes / part / "circle").rename(shapes / part / "<b>&round")
    run = train("folders", out=tmp_path / "run", options=own | {"data.path": str(shapes)})
    text = (run.folder / "report.html").read_text("utf-8")
    assert "&lt;b&gt;&amp;round" in text and "<b>&round" not in text
    assert "<th>client</th><th>images</th>" in text  # the clients' labels are unknown
    assert "fedseal train" in text
    (shapes / "server").rename(shapes / "labels")  # as after a deployed run, which has only the labels
    text = write.rewrite_report(run.folder).read_text("utf-8")
    assert "fedseal train" not in text and "--test DIR" in text


@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this processor has no AVX2")
def test_it_is_made_with_the_arithmetic_of_the_run(copy: Path) -> None:
    """Features of a frozen network would be computed once more with another one."""
    script = """
import sys
from pathlib import Path
from fedseal.report.write import rewrite_report
from fedseal.system.environment import used_arithmetic

rewrite_report(Path(sys.argv[1]))
print(used_arithmetic())
"""
    clean = {key: value for key, value in os.environ.items() if key not in AVX2}
    done = subprocess.run(
        [sys.executable, "-c", script, copy], env=clean, capture_output=True, text=True, check=True
    )
    assert done.stdout == "portable\n"


def test_several_runs_side_by_side(
    finished: Path, tiny: dict[str, Any], fedseal: Command, tmp_path: Path
) -> None:
    other = train(
        "fmnist-lenet", out=tmp_path / "other", options={**tiny, "method": "semifl", "seed": 1}
    ).folder
    page = tmp_path / "both.html"
    assert fedseal("report", finished, other, "--out", page).code == 0
    text = page.read_text("utf-8")
    assert "fedseal, seed 0" in text and "semifl, seed 1" in text and "different splits" in text
    assert fedseal("report", other).code == 0
    assert "Accuracy by round" in (other / "report.html").read_text("utf-8")


def test_a_folder_without_a_run_is_named(fedseal: Command, copy: Path, tmp_path: Path) -> None:
    fedseal("report", tmp_path / "none").refuses(f"{tmp_path / 'none'} is not a run folder")
    (copy / "summary.json").write_text("{}")
    fedseal("report", copy).refuses(f"{copy} does not contain a finished run")
    with pytest.raises(UserError, match="does not contain a finished run"):
        write.compare_runs([copy, copy], tmp_path / "both.html")
    assert not (tmp_path / "both.html").exists()


def test_a_report_goes_where_it_is_told(fedseal: Command, copy: Path, tmp_path: Path) -> None:
    (copy / "report.html").unlink()
    assert fedseal("report", copy, "--out", tmp_path / "one.html").code == 0
    assert "Confusion" in (tmp_path / "one.html").read_text("utf-8") and not (copy / "report.html").exists()
    (copy / "events.jsonl").write_text("7\n")
    fedseal("report", copy).refuses(f"{copy / 'events.jsonl'} is damaged in line 1")


def test_a_run_without_its_model_has_a_report(fedseal: Command, copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert fedseal("report", copy).code == 0
    text = (copy / "report.html").read_text("utf-8")
    assert "Thresholds τ by class" in text and "Ankle boot" in text and "Confusion" not in text
