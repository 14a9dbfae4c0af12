"""The command line: its output, complete runs on image folders, and Ctrl-C."""

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from conftest import PAPERS_METHOD, SHAPES, Command, contents, same_weights, settings
from fedseal.config.config import parse
from fedseal.config.load import list_presets, load_config
from fedseal.data import cache
from fedseal.data.catalogue import PUBLISHED
from fedseal.data.federation import load_federation
from fedseal.storage import model_file
from fedseal.training.train import train

PROGRAM = Path(sys.executable).with_name("fedseal")

COMMANDS = [
    *("train", "presets", "show", "evaluate", "report", "predict", "export", "reproduce"),
    *("data", "data list", "data get", "data show", "data clean"),
    "doctor",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(fedseal: Command, command: str) -> None:
    answer = fedseal(*command.split(), "--help")
    assert answer.code == 0
    assert f"Example:  fedseal {command}" in answer.out


def test_help_explains_arguments(fedseal: Command) -> None:
    assert "A name from 'fedseal presets', or a TOML file." in fedseal("train", "--help").out
    assert "--list" in fedseal("reproduce", "--help").out


def test_help_of_the_program_shows_a_first_command(fedseal: Command) -> None:
    answer = fedseal("--help")
    assert answer.code == 0 and "fedseal train demo --baseline" in answer.out
    assert all(command in answer.out for command in ("train", "predict", "data"))


def test_help_and_flower_programs_do_not_import_pytorch() -> None:
    """PyTorch takes seconds and hundreds of megabytes to load."""
    code = "import fedseal.cli.main, fedseal.deploy.flower_program, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_usage_errors_exit_with_code_2(fedseal: Command) -> None:
    for words in (["trian"], ["train", "--rounds", "3"], ["predict"], ["train", "--seed", "x"]):
        answer = fedseal(*words)
        assert answer.code == 2 and "Error" in answer.err


def test_presets_lists_all_presets(fedseal: Command) -> None:
    out = fedseal("presets").out
    assert all(name in out for name in list_presets()) and "base-" not in out


@pytest.mark.parametrize("name", ["fmnist-lenet", "svhn-resnet9", "folders"])
def test_show_prints_the_complete_configuration(fedseal: Command, name: str) -> None:
    answer = fedseal("show", name)
    assert answer.code == 0
    assert parse(tomllib.loads(answer.out), "shown") == load_config(name)


def test_show_explains_the_keys(fedseal: Command) -> None:
    out = fedseal("show", "fmnist-lenet", "--set", "method=semifl").out
    assert 'method = "semifl"  # the method: fedseal, ' in out
    assert "\n# flip =  # mirror images at random; left out: the data set's default (no for digits)\n" in out
    assert "# the network, FILE.py:function for your own; one of lenet, resnet9, resnet18, " in out
    assert "\n[semifl]\n" in out and "# minimum confidence of a pseudo-label\n" in out


def test_version(fedseal: Command) -> None:
    assert fedseal("--version").out == f"fedseal {version('fedseal')}\n"


def test_data_list(fedseal: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = fedseal("data", "list").out
    assert all(name in out for name in PUBLISHED)
    assert "70,000" in out and str(cache.origin("fashion-mnist")) in out
    monkeypatch.setenv("FEDSEAL_DATA", str(tmp_path))
    assert "not here yet: fedseal data get fashion-mnist" in fedseal("data", "list").out


def test_data_show_with_a_picture(fedseal: Command, tiny: dict[str, Any], tmp_path: Path) -> None:
    picture = tmp_path / "mix.png"
    answer = fedseal("data", "show", "fmnist-lenet", "--picture", picture, options=tiny)
    assert answer.code == 0 and f"picture: {picture}\n" in answer.out
    assert "labelled 50 · validation 20 · 3 clients with 120 images · test 60" in answer.out
    config = load_config("fmnist-lenet", tiny)
    assert f"split {load_federation(config.data, config.seed).fingerprint} (seed 0)" in answer.out
    assert answer.out.count(" 40 images ") == 3
    with Image.open(picture) as image:
        image.verify()
        assert image.format == "PNG" and image.width > 500


def test_data_show_of_folders(fedseal: Command, own: dict[str, Any]) -> None:
    out = fedseal("data", "show", "folders", options=own).out
    assert "north     18 images" in out and "south     18 images" in out


def test_train_shows_the_result_and_the_baseline(
    fedseal: Command, tiny: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    answer = fedseal(
        "train", "fmnist-lenet", "--out", run, "--seed", 3, "--workers", 1, "--baseline", options=tiny
    )
    assert (answer.code, answer.err) == (0, "")
    results = [json.loads((f / "summary.json").read_text()) for f in (run, run / "server-sl")]
    assert [r["method"] for r in results] == ["fedseal", "server-sl"]
    assert [r["seed"] for r in results] == [3, 3] and results[0]["split"] == results[1]["split"]
    ours, theirs = (r["test_accuracy"]["mean_last_10"] for r in results)
    assert "fedseal, 2 rounds" in answer.out and f"{ours:.2%}" in answer.out
    assert "Server-SL, 2 rounds" in answer.out and f"{theirs:.2%}" in answer.out
    assert f"{100 * (ours - theirs):+.2f} points" in answer.out
    text = " ".join(answer.out.split())  # lines may be wrapped
    assert "70 labels (50 for training, 20 for validation)" in text
    assert f"run folder: {run}\n" in answer.out

    before = contents(run)
    again = fedseal(
        "train",
        "fmnist-lenet",
        "--out",
        run,
        "--seed",
        3,
        "--workers",
        1,
        "--baseline",
        "--resume",
        options=tiny,
    )
    assert again.code == 0 and contents(run) == before


def test_quiet_prints_nothing(fedseal: Command, tiny: dict[str, Any], tmp_path: Path) -> None:
    answer = fedseal("train", "fmnist-lenet", "-q", "--out", tmp_path / "run", options=tiny | {"rounds": 1})
    assert (answer.code, answer.out, answer.err) == (0, "", "")


def test_image_folders_from_training_to_prediction(
    fedseal: Command, own: dict[str, Any], shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the installed program in the folder with the images, as a user would."""
    changed = {"data.path": "shapes", "bootstrap.epochs": 30, "bootstrap.lr": 0.02, "fedshift.teachers": 2}
    longer = {key: value for key, value in own.items() if key not in PAPERS_METHOD} | changed
    done = subprocess.run(
        [PROGRAM, "train", "folders", *settings(longer)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    run = tmp_path / "runs" / "folders-seed0"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["labels"] == {"training": 19, "validation": 5, "total": 24} and summary["clients"] == 2
    assert "run folder: runs/folders-seed0\n" in done.stdout

    monkeypatch.chdir(tmp_path)  # the folder in which the user trained
    answer = fedseal("evaluate", run)
    assert answer.code == 0
    assert f"{'test accuracy':22} {summary['average_test_accuracy']['last']:.2%}\n" in answer.out
    assert f"{'validation accuracy':22} {summary['average_validation_accuracy']['last']:.2%}\n" in answer.out

    images = [shapes / "test" / shape / "0.png" for shape in SHAPES]
    answer = fedseal("predict", run, *images)
    assert answer.code == 0
    lines = answer.out.splitlines()
    found = model_file.load(run).predict(images)
    for image, line, name, confidence in zip(images, lines, found.labels, found.confidences, strict=True):
        assert line == f"{image}  {name}  {confidence:.1%}" and name in SHAPES
    assert fedseal("predict", run / "model.safetensors", *images).out == answer.out

    (shapes / "test" / "notes.txt").write_text("no image")
    answer = fedseal("predict", run, shapes / "test", "--adapt", "--csv", tmp_path / "out.csv")
    assert answer.code == 0
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = model_file.load(run).predict([shapes / "test"], adapt=True)
    assert [row["file"] for row in rows] == [str(file) for file in found.files]
    assert [row["class"] for row in rows] == found.labels and len(rows) > len(SHAPES)
    assert f"{len(rows)} predictions" in answer.out and "as estimated" in answer.out
    for name, share in zip(sorted(SHAPES), found.mix, strict=True):
        assert f"{share:.1%}" in next(line for line in answer.out.splitlines() if line.split()[0] == name)


def test_predict_skips_other_files_and_marks_unsure_images(
    fedseal: Command, finished: Path, shapes: Path, tmp_path: Path
) -> None:
    text, gone, out = shapes / "test" / "notes.txt", tmp_path / "gone.png", tmp_path / "out.csv"
    text.write_text("no image")
    folder = shapes / "test"
    found = model_file.load(finished).predict(folder)
    limit = sorted(found.confidences)[7]
    answer = fedseal("predict", finished, gone, folder, "--min-confidence", limit, "--csv", out)
    assert (answer.code, answer.out) == (0, f"15 predictions: {out}\n")
    assert answer.err == (
        f"warning: skipped {gone}: not a readable image (No such file or directory)\n"
        f"warning: skipped {text}: not a readable image (unknown format)\n"
    )
    with out.open() as file:
        rows = list(csv.DictReader(file))
    unsure = [confidence < limit for confidence in found.confidences]
    assert [row["class"] == "" for row in rows] == unsure and unsure.count(True) == 7
    lines = fedseal("predict", finished, folder, "--min-confidence", limit).out.splitlines()
    assert ["  unsure  " in line for line in lines] == unsure
    assert "unsure" in fedseal("predict", "--help").out

    fedseal("predict", finished, folder, "--min-confidence", "2").refuses("must be between 0 and 1, not 2.0")
    answer = fedseal("predict", finished, gone, text)
    assert answer.code == 2 and answer.err.count("\n") == 3
    assert answer.err.endswith(f"error: There are no readable images in {gone}, {text}: check the path.\n")


def test_predict_file_name_that_is_not_utf8(fedseal: Command, finished: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    Image.new("L", (28, 28)).save(tmp_path / name)
    assert "caf\\udce9.png  " in fedseal("predict", finished, tmp_path).out
    assert fedseal("predict", finished, tmp_path, "--csv", tmp_path / "out.csv").code == 0
    assert b"caf\xe9.png," in (tmp_path / "out.csv").read_bytes()


def test_image_folders_without_test_images(
    fedseal: Command, own: dict[str, Any], shapes: Path, tmp_path: Path
) -> None:
    (shapes / "test").rename(tmp_path / "elsewhere")
    run = tmp_path / "run"
    answer = fedseal("train", "folders", "--out", run, options=own)
    assert (answer.code, answer.err) == (0, "")
    summary = json.loads((run / "summary.json").read_text())
    assert "test_accuracy" not in summary
    shown = summary["validation_accuracy"]["mean_last_10"]
    assert "validation accuracy" in answer.out and f"{shown:.2%}" in answer.out
    assert "test accuracy" not in answer.out
    answer = fedseal("evaluate", run)
    assert answer.out == f"{'validation accuracy':22} {summary['validation_accuracy']['last']:.2%}\n"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_ctrl_c_stops_cleanly_and_the_run_can_be_resumed(
    fedseal: Command, tiny: dict[str, Any], tmp_path: Path
) -> None:
    run, keys = tmp_path / "a run", tiny | {"rounds": 30, "engine.workers": 2}
    process = subprocess.Popen(
        [PROGRAM, "train", "fmnist-lenet", "--out", run, *settings(keys)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
    )
    log, deadline = run / "events.jsonl", time.monotonic() + 200
    try:
        while not (log.exists() and log.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        assert len(processes_of(process.pid)) >= 3  # at least the run and two workers
        os.killpg(process.pid, signal.SIGINT)  # to all processes, as a terminal does
        _, message = process.communicate(timeout=100)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    assert process.returncode == 130
    assert message.startswith("Stopped. Continue with: fedseal train ") and message.count("\n") == 1
    deadline = time.monotonic() + 10
    while processes_of(process.pid):  # Python's resource tracker needs a moment
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (run / "summary.json").exists()

    program, *words = shlex.split(message.partition("Continue with: ")[2])
    assert program == "fedseal"
    answer = fedseal(*words, "--workers", 1)
    assert answer.code == 0
    train("fmnist-lenet", out=tmp_path / "whole", options=keys | {"engine.workers": 1})
    assert same_weights(run, tmp_path / "whole")
    lengths = [len((f / "events.jsonl").read_text().splitlines()) for f in (run, tmp_path / "whole")]
    assert lengths == [30, 30]


def processes_of(session: int) -> list[int]:
    """The ids of the running processes of a session."""
    running = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, number = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # the process has just ended
            continue
        if int(number) == session and state != "Z":
            running.append(int(path.parent.name))
    return running
