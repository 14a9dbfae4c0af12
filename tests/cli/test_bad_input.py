"""Bad input: the command prints one sentence that names it, exits with code 2, and overwrites nothing."""

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conftest import Command, contents, same_weights
from fedseal.cli import main
from fedseal.config.load import load_config
from fedseal.core import Packet
from fedseal.data.catalogue import PUBLISHED
from fedseal.storage import model_file
from fedseal.storage.events_file import read_events
from fedseal.training.train import train

# ------------------------------------------------------------------ the command line and the configuration


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--set", "round=3"], ["fmnist-lenet: unknown key 'round' (did you mean 'rounds'?)"]),
        (["--set", "data.label=3"], ["unknown key 'data.label' (did you mean 'labels'?)"]),
        (["--set", "fedseal.thta=1"], ["unknown key 'fedseal.thta' (did you mean 'theta'?)"]),
        (["--set", "rounds=many"], ["'rounds' is 'many', but it should be a valid integer"]),
        (["--set", "fedseal.theta=2"], ["'fedseal.theta' is 2, but it should be less than or equal to 1."]),
        (["--set", "method=fedsael"], ["method must be one of fedseal, ", "not 'fedsael'"]),
        (["--set", "rounds"], ["--set takes KEY=VALUE, not 'rounds'."]),
        (["--set", "=5"], ["--set takes KEY=VALUE, not '=5'."]),
        (["--seed", "-1"], ["'seed' is -1"]),
        (["--workers", "-1"], ["'engine.workers' is -1"]),
        (["--set", "data.labels=60000"], ["Class 'T-shirt/top' has 6000 images", "lower data.labels"]),
        (["--set", "data.clients=100"], ["100 clients with 1200 images each", "lower data.clients"]),
        (["--set", "data.labels=3"], ["data.labels = 3 leaves a class without labels: raise it to 10"]),
        (["--set", "data.test_per_client=3000"], ["lower data.clients or data.test_per_client"]),
        (
            ["--set", "cohort=11"],
            ["cohort is 11, but there are 10 clients: lower it, or set it to 0 for all."],
        ),
        (
            ["--set", "aggregate.rule=multi-krum", "--set", "cohort=3"],
            ["multi-krum compares at least 4 clients, but a round has 3: choose another aggregate.rule."],
        ),
        (
            ["--set", "aggregate.rule=fltrust", "--set", "server.epochs=0"],
            ["fltrust trusts the server's own update, but server.epochs is 0: raise it."],
        ),
        (
            ["--set", "data.path=x"],
            ["data.path does not apply to fashion-mnist", "fedseal data get fashion-mnist --from x"],
        ),
        (["--set", "augment.shift=28"], ["augment.shift is 28, but images are 28 pixels wide: lower it."]),
        (["--set", "model.name=resnet9"], ["ResNet-9 needs images of 32×32", "not 28×28"]),
    ],
)
def test_bad_setting_is_refused_before_anything_is_written(
    fedseal: Command, tmp_path: Path, words: list[str], parts: list[str]
) -> None:
    fedseal("train", "fmnist-lenet", "--out", tmp_path / "run", *words).refuses(*parts)
    assert not (tmp_path / "run").exists()


def test_missing_device(fedseal: Command, tmp_path: Path) -> None:
    device = next(
        (name for name, available in (("cuda", torch.cuda.is_available()), ("mps", False)) if not available),
        "mps",
    )
    answer = fedseal("train", "fmnist-lenet", "--out", tmp_path / "run", options={"engine.device": device})
    answer.refuses(f"engine.device is '{device}', but this machine has no such device: use 'auto'.")
    assert not (tmp_path / "run").exists()


def test_missing_validation_images(fedseal: Command, tmp_path: Path) -> None:
    answer = fedseal("train", "fmnist-lenet", "--out", tmp_path / "run", options={"data.validation": 0})
    assert answer.code == 2 and not (tmp_path / "run").exists()
    sentence = "error: data.validation is 0, but every run needs validation images: raise it."
    assert answer.err.splitlines()[-1] == sentence


def test_bad_file_or_preset(fedseal: Command, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    fedseal("train", bad).refuses(f"There is no configuration file {bad}; 'fedseal presets' lists")
    bad.write_text("rounds = = 3")
    fedseal("train", bad).refuses(f"{bad} is not valid TOML: Invalid value (at line 1, column 10).")
    fedseal("show", bad).refuses(f"{bad} is not valid TOML")
    bad.write_text("[server]\nlearning_rate = 3")
    fedseal("train", bad).refuses(f"{bad}: unknown key 'server.learning_rate'; choose from lr, decay, ")
    fedseal("train", "dmo").refuses("There is no preset 'dmo' (did you mean 'demo'?)")
    fedseal("data", "show", "dmo").refuses("There is no preset 'dmo' (did you mean 'demo'?)")


# ------------------------------------------------------------------ image folders


def test_empty_class(fedseal: Command, own: dict[str, Any], shapes: Path, tmp_path: Path) -> None:
    (shapes / "server" / "star").mkdir()
    answer = fedseal("train", "folders", "--out", tmp_path / "run", options=own)
    answer.refuses(
        f"Class 'star' has no readable image: add images to {shapes / 'server' / 'star'}, or remove it."
    )
    assert not (tmp_path / "run").exists()


def test_empty_client(fedseal: Command, own: dict[str, Any], shapes: Path, tmp_path: Path) -> None:
    (shapes / "clients" / "west").mkdir()
    answer = fedseal("train", "folders", "--out", tmp_path / "run", options=own)
    answer.refuses(
        f"Client 'west' has no readable image: add images to {shapes / 'clients' / 'west'}, or remove"
    )
    assert not (tmp_path / "run").exists()


def test_missing_folders(fedseal: Command, own: dict[str, Any], shapes: Path) -> None:
    gone = shapes / "gone"
    fedseal("train", "folders", options=own | {"data.path": gone}).refuses(
        f"There is no folder {gone}: give a folder that contains server/ and clients/."
    )
    shutil.rmtree(shapes / "clients")
    fedseal("train", "folders", options=own).refuses(
        f"{shapes} has no clients/: add it, with one folder for each client."
    )


def test_corrupt_images_are_skipped_counted_and_named(
    fedseal: Command, own: dict[str, Any], shapes: Path, tmp_path: Path
) -> None:
    cut, text = shapes / "clients" / "north" / "circle-0.png", shapes / "server" / "circle" / "notes.txt"
    cut.write_bytes(cut.read_bytes()[:60])
    text.write_text("no image")
    run = tmp_path / "run"
    answer = fedseal("train", "folders", "--out", run, options=own)
    assert answer.code == 0
    for path in (cut, text):
        assert f"warning: skipped {path}: not a readable image (" in answer.err
    assert json.loads((run / "summary.json").read_text())["skipped_files"] == 2
    assert json.loads((run / "summary.json").read_text())["rounds"] == 2


# ------------------------------------------------------------------ models, images, runs


def test_predict_refuses_a_corrupt_image_and_a_missing_one(
    fedseal: Command, finished: Path, tmp_path: Path
) -> None:
    image = tmp_path / "broken.png"
    fedseal("predict", finished, image).refuses(f"There is no image {image}: check the path.")
    image.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    fedseal("predict", finished, image).refuses(f"{image} is not a readable image")
    empty = tmp_path / "empty"
    empty.mkdir()
    fedseal("predict", finished, empty).refuses(f"There are no readable images in {empty}: check the path.")


def test_predict_refuses_anything_but_a_model(fedseal: Command, finished: Path, tmp_path: Path) -> None:
    model, image = tmp_path / "model.safetensors", tmp_path / "any.png"
    fedseal("predict", tmp_path, image).refuses(
        f"There is no model {model}: give the folder of a finished run."
    )
    for content in (b"", b"not at all", bytes(range(256)) * 20):
        model.write_bytes(content)
        fedseal("predict", model, image).refuses(f"{model} is damaged, or not a fedseal model")
    model.write_bytes((finished / "model.safetensors").read_bytes()[:-100])
    fedseal("predict", model, image).refuses(f"{model} is damaged, or not a fedseal model")
    save_file({"w": torch.zeros(3)}, model)
    fedseal("predict", model, image).refuses(f"{model} is damaged, or not a fedseal model")


def test_evaluate_refuses_anything_but_a_finished_run(fedseal: Command, copy: Path, tmp_path: Path) -> None:
    fedseal("evaluate", tmp_path).refuses(f"{tmp_path} is not a run folder: it has no config.toml.")
    fedseal("evaluate", tmp_path / "gone").refuses(f"{tmp_path / 'gone'} is not a run folder")
    (copy / "summary.json").write_text("{")
    fedseal("evaluate", copy).refuses(f"{copy / 'summary.json'} is missing or damaged: finish the run with")
    (copy / "model.safetensors").unlink()
    fedseal("evaluate", copy).refuses(f"There is no model {copy / 'model.safetensors'}")


def test_files_of_a_run_that_cannot_be_read_are_not_called_damaged(fedseal: Command, copy: Path) -> None:
    for name in ("summary.json", "model.safetensors"):
        (copy / name).rename(copy / f"former-{name}")
        (copy / name).mkdir()
        reason = f"Cannot read {copy / name} (Is a directory): check the file, then try again."
        fedseal("evaluate", copy).refuses(reason)
        (copy / name).rmdir()
        (copy / f"former-{name}").rename(copy / name)
    (copy / "summary.json").unlink()
    (copy / "summary.json").mkdir()
    fedseal("report", copy).refuses(f"Cannot read {copy / 'summary.json'} (Is a directory)")


def test_evaluate_refuses_changed_data(
    fedseal: Command, own: dict[str, Any], shapes: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert fedseal("train", "folders", "--out", run, "-q", options=own).code == 0
    (shapes / "test" / "circle" / "0.png").unlink()
    fedseal("evaluate", run).refuses(f"The data have changed since the run in {run}")


def test_data_get_refuses_tampered_and_unknown_files(
    fedseal: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSEAL_DATA", str(tmp_path / "cache"))
    files = tmp_path / "files"
    fedseal("data", "get", "fashion-mnist", "--from", files).refuses(
        f"There is no folder {files}: give the folder with the files of Fashion-MNIST."
    )
    files.mkdir()
    for name in PUBLISHED["fashion-mnist"].downloads:
        (files / name).write_bytes(b"\x1f\x8b tampered")
    answer = fedseal("data", "get", "fashion-mnist", "--from", files)
    answer.refuses(str(files))
    assert not (tmp_path / "cache" / "fashion-mnist").exists()
    fedseal("data", "get", "mnist").refuses("There is no data set 'mnist': choose one of fashion-mnist, ")


def test_data_show_refuses_a_picture_it_cannot_draw(
    fedseal: Command,
    tiny: dict[str, Any],
    own: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders = fedseal("data", "show", "folders", "--picture", tmp_path / "mix.png", options=own)
    folders.refuses("--picture needs the classes of the clients' images, which are unknown for folders.")
    monkeypatch.delenv("FEDSEAL_DATA")
    for name in ("mix.xyz", "gone/mix.png"):
        path = tmp_path / name
        fedseal("data", "show", "fmnist-lenet", "--picture", path, options=tiny).refuses(
            f"Cannot write {path} (", "--picture"
        )
        assert not path.exists()


# ------------------------------------------------------------------ the output folder


def test_folder_with_a_run_is_not_overwritten(fedseal: Command, copy: Path, tiny: dict[str, Any]) -> None:
    before = contents(copy)
    answer = fedseal("train", "fmnist-lenet", "--out", copy, options=tiny)
    answer.refuses(f"{copy} already holds a run: add --resume to continue it, or choose another --out.")
    assert contents(copy) == before


def test_folder_with_other_files_is_not_changed(
    fedseal: Command, tmp_path: Path, tiny: dict[str, Any]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    before = contents(tmp_path)
    for words in ([], ["--resume"]):
        answer = fedseal("train", "fmnist-lenet", "--out", tmp_path, *words, options=tiny)
        answer.refuses(f"{tmp_path} holds other files and no run: choose another --out.")
    assert contents(tmp_path) == before


def test_log_and_mlflow_store_of_the_run_may_be_in_its_folder(
    fedseal: Command, tmp_path: Path, tiny: dict[str, Any]
) -> None:
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    run = tmp_path / "run"
    inside = ("--log", run / "logs" / "train.log", "--mlflow", run / "mlruns")
    answer = fedseal("train", "fmnist-lenet", "--out", run, *inside, options=tiny | {"rounds": 1})
    assert (answer.code, answer.err) == (0, "")
    assert (run / "summary.json").exists() and (run / "mlruns").is_dir()
    assert stat.S_IMODE(run.stat().st_mode) == 0o700


def test_failed_start_does_not_block_the_folder(
    fedseal: Command, tmp_path: Path, tiny: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    (run / "checkpoint").mkdir(parents=True)
    (run / "checkpoint" / "lock").touch()
    (run / "config.toml").write_text("seed = 7\n")
    assert fedseal("train", "fmnist-lenet", "--out", run, "-q", options=tiny).code == 0
    assert load_config(run / "config.toml").seed == 0


def test_fedavg_sl_needs_labels_of_the_clients(fedseal: Command, tmp_path: Path, own: dict[str, Any]) -> None:
    answer = fedseal("train", "folders", "--out", tmp_path / "run", options=own | {"method": "fedavg-sl"})
    answer.refuses("fedavg-sl needs labels of the clients' images, but these have none.")
    assert not (tmp_path / "run").exists()


def test_folder_that_cannot_be_written(fedseal: Command, tmp_path: Path, tiny: dict[str, Any]) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    answer = fedseal("train", "fmnist-lenet", "--out", file, options=tiny)
    answer.refuses(f"{file} cannot be a run folder (Not a directory): choose another --out.")
    below = file / "run"
    answer = fedseal("train", "fmnist-lenet", "--out", below, options=tiny)
    answer.refuses(f"Cannot write {below} (Not a directory): choose another folder.")
    assert contents(tmp_path).keys() == {"file"} and file.read_text() == "kept"


# ------------------------------------------------------------------ checkpoints


def test_run_is_not_resumed_with_another_configuration(
    fedseal: Command, copy: Path, tiny: dict[str, Any]
) -> None:
    before = contents(copy)
    config = copy / "config.toml"
    for key, value in (("fedseal.theta", 0.05), ("seed", 1), ("method", "server-sl")):
        answer = fedseal("train", config, "--out", copy, "--resume", "--set", f"{key}={value}")
        answer.refuses(f"{copy} holds a run with another configuration: resume it with {config}, or choose")
    answer = fedseal("train", config, "--out", copy, "--resume", "--set", "rounds=1")
    answer.refuses(f"{copy} already has 2 rounds, but rounds is 1: raise it, or choose another --out.")
    assert contents(copy) == before


def test_checkpoint_of_other_data_is_refused(
    fedseal: Command, own: dict[str, Any], shapes: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert fedseal("train", "folders", "--out", run, "-q", options=own).code == 0
    (shapes / "clients" / "north" / "circle-0.png").unlink()
    before = contents(run)
    answer = fedseal("train", "folders", "--out", run, "--resume", options=own | {"rounds": 3})
    answer.refuses(f"{run / 'checkpoint' / 'state.safetensors'} belongs to another configuration, other data")
    assert contents(run) == before


@pytest.mark.parametrize("kept", [0, 5, 3000, -1])
def test_damaged_checkpoint_is_refused(fedseal: Command, copy: Path, kept: int) -> None:
    state = copy / "checkpoint" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:kept])
    before = contents(copy)
    answer = fedseal("train", copy / "config.toml", "--out", copy, "--resume", "--set", "rounds=3")
    answer.refuses(f"{state} is damaged (", "): delete it to start again.")
    assert contents(copy) == before


def test_missing_and_damaged_memories_are_refused(fedseal: Command, copy: Path) -> None:
    folder = copy / "checkpoint"
    memories, resume = folder / "memories.sqlite", ("train", copy / "config.toml", "--out", copy, "--resume")
    whole = memories.read_bytes()
    for kept in (0, 5, 3000, 4096, -1):
        memories.write_bytes(whole[:kept])
        before = contents(copy)
        answer = fedseal(*resume, "--set", "rounds=3")
        answer.refuses(f"{memories} is damaged (", f"): delete {folder} to start again.")
        assert contents(copy) == before
    memories.unlink()
    answer = fedseal(*resume, "--set", "rounds=3")
    answer.refuses(f"{memories} is missing (", f"): delete {folder} to start again.")
    shutil.rmtree(folder)
    assert fedseal(*resume, "--set", "rounds=1", "-q").code == 0


def test_damaged_summary_is_rewritten_and_missing_events_are_reported(fedseal: Command, copy: Path) -> None:
    summary = copy / "summary.json"
    whole = json.loads(summary.read_text())
    summary.write_text('{"rounds"')
    resume = ["train", copy / "config.toml", "--out", copy, "--resume", "-q"]
    assert fedseal(*resume).code == 0
    again = json.loads(summary.read_text())
    assert {k: v for k, v in again.items() if k != "seconds"} == {
        k: v for k, v in whole.items() if k != "seconds"
    }
    summary.unlink()
    (copy / "events.jsonl").unlink()
    fedseal(*resume).refuses(
        f"{copy / 'events.jsonl'} is damaged, or a round is missing: delete {copy} to run it again."
    )


# ------------------------------------------------------------------ NaN


def test_clients_with_nan_are_left_out_and_the_run_continues(
    fedseal: Command, tiny: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    keys = tiny | {"client.lr": 1e300, "engine.min_replies": 0}
    answer = fedseal("train", "fmnist-lenet", "--out", run, options=keys)
    assert answer.code == 0
    assert (
        "replies left out: 2 of client-0, 2 of client-1, 2 of client-2; events.jsonl says why" in answer.out
    )
    assert "replies left out: 2 of client-0, " in (run / "report.html").read_text("utf-8")
    reason = "its model has NaN or infinite weights (is client.lr too high?)"
    assert f"warning: round 1: client-0 is left out: {reason}\n" in answer.err
    events = read_events(run / "events.jsonl")
    expected = {"event": "left-out", "t": 2, "client": "client-2", "reason": reason, "worker_died": False}
    assert expected in events
    rounds = [event for event in events if event["event"] == "round"]
    assert [event["t"] for event in rounds] == [1, 2]
    assert rounds[0]["left_out"] == ["client-0", "client-1", "client-2"]
    assert model_file.load(run)(torch.zeros(1, 1, 28, 28, dtype=torch.uint8)).isfinite().all()


def test_round_without_a_usable_reply_stops_the_run(
    fedseal: Command, tiny: dict[str, Any], tmp_path: Path
) -> None:
    answer = fedseal("train", "fmnist-lenet", "--out", tmp_path / "run", options=tiny | {"client.lr": 1e300})
    sentence = (
        "error: Round 1: only 0 of 3 clients sent a usable reply, but a round needs 2 (engine.min_replies): "
    )
    assert answer.code == 2 and answer.err.splitlines()[-1].startswith(sentence)
    assert not (tmp_path / "run" / "summary.json").exists()


def test_nan_at_the_server_stops_the_run(fedseal: Command, tiny: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    answer = fedseal("train", "fmnist-lenet", "--out", run, options=tiny | {"server.lr": 1e30})
    answer.refuses("Round 1: the server's model has NaN or infinite weights", "lower server.lr (1e+30)")
    assert not (run / "summary.json").exists() and not (run / "model.safetensors").exists()


def test_nan_in_a_later_round_keeps_the_last_checkpoint(
    fedseal: Command, tiny: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    diverging = {"rounds": 9, "server.lr": 1e5, "server.batch": 50, "fedseal.bootstrap_epochs": 0}
    answer = fedseal("train", "fmnist-lenet", "--out", run, options=tiny | diverging)
    answer.refuses("the server's model has NaN or infinite weights", "lower server.lr (100000.0)")
    failed = int(answer.err.removeprefix("error: Round ").split(":")[0])
    state = Packet.from_bytes((run / "checkpoint" / "state.safetensors").read_bytes())
    assert failed > 1 and state.scalars["t"] == failed - 1
    assert all(value.isfinite().all() for value in state.tensors["state.model"].values())


# ------------------------------------------------------------------ a full disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk that a run can fill."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=900k", "tmpfs", folder)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small disk: {error}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True)


def test_disk_that_fills_up_keeps_the_last_checkpoint(
    fedseal: Command, disk: Path, tiny: dict[str, Any], tmp_path: Path
) -> None:
    run, tiny = disk / "run", tiny | {"fedseal.bootstrap_epochs": 0}
    answer = fedseal("train", "fmnist-lenet", "--out", run, options=tiny)
    state = run / "checkpoint" / "state.safetensors"
    following = state.with_name("next.safetensors")
    answer.refuses(
        f"No space left to write {following}: free some space, then continue the run with --resume."
    )
    assert {path.name for path in run.rglob("*") if path.is_file() and "tfevents" not in path.name} == {
        "config.toml",
        "events.jsonl",
        "state.safetensors",
        "memories.sqlite",
        "lock",
    }
    assert Packet.from_bytes(state.read_bytes()).scalars["t"] == 1

    mount("-o", "remount,size=5m", disk)
    assert fedseal("train", run / "config.toml", "--out", run, "--resume", "-q").code == 0
    train("fmnist-lenet", out=tmp_path / "reference", options=tiny)
    assert same_weights(run, tmp_path / "reference")


@pytest.mark.parametrize("size", ["4k", "8k", "12k", "300k"])
def test_disk_that_is_full_from_the_start(
    fedseal: Command, disk: Path, tiny: dict[str, Any], size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", main.ignore_disk_errors)  # as main() does
    mount("-o", f"remount,size={size}", disk)
    run = disk / "run"
    fedseal("train", "fmnist-lenet", "--out", run, options=tiny).refuses("No space left to write ", str(run))
    assert not {"summary.json", "model.safetensors"} & {path.name for path in run.rglob("*")}
    if (run / "config.toml").exists():
        assert load_config(run / "config.toml").rounds == 2


# ------------------------------------------------------------------ values that no machine can handle


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["data.size=100000"], ["'data.size' is 100000, but it should be less than or equal to 4096."]),
        (["server.threads=100000"], ["'server.threads' is 100000", "less than or equal to 1024."]),
        (["engine.workers=100000"], ["'engine.workers' is 100000"]),
        (["model.width=100000"], ["'model.width' is 100000"]),
        ([f"rounds={10**20}"], ["in 'rounds', the number must be at most 1,000,000,000."]),
        ([f"seed={2**63}"], ["'seed' is 9223372036854775808"]),
        (["rounds=" + "9" * 5000], ["'rounds' is "]),
        (["rounds=" + "[" * 5000], ["'rounds' is "]),
        (["engine.deadline=inf"], ["'engine.deadline' is inf"]),
        (["client.lr=nan"], ["'client.lr' is nan"]),
    ],
)
def test_absurd_values_are_refused(fedseal: Command, words: list[str], parts: list[str]) -> None:
    fedseal("show", "fmnist-lenet", *(f"--set={word}" for word in words)).refuses(*parts)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty: 'fedseal show fmnist-lenet' prints a complete file."),
        ("x = " + "[" * 5000, "is not valid TOML: maximum recursion depth exceeded."),
        ("rounds = " + "9" * 5000, "is not valid TOML: Exceeds the limit (4300 digits)"),
    ],
    ids=["empty", "brackets", "digits"],
)
def test_absurd_files_are_refused(fedseal: Command, tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(content)
    fedseal("show", path).refuses(f"{path} {reason}")


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "-1", "1e300"])
def test_a_time_that_is_none_is_refused(fedseal: Command, tmp_path: Path, seconds: str) -> None:
    for words in (["join", "localhost:9", "--images", tmp_path], ["serve", "demo", "--labels", tmp_path]):
        answer = fedseal(*words, "--insecure", "--name", "north", "--wait", seconds)
        answer.refuses(f"--wait is {float(seconds)}, but must be a number of seconds from 0 to 1e+09.")


def test_a_device_is_not_replaced(fedseal: Command, finished: Path) -> None:
    for words in (["report", finished, "--out"], ["predict", finished, finished, "--csv"]):
        assert Path("/dev/full").is_char_device()
        answer = fedseal(*words, "/dev/full")
        assert answer.code == 2 and Path("/dev/full").is_char_device()
    fedseal("report", finished, "--out", "/dev/full").refuses("Cannot write /dev/full (not a regular file)")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode(encoding: str) -> None:
    command = [sys.executable, "-m", "fedseal", "data", "list"]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding})
    assert done.returncode == 0 and done.stderr == b"" and b"fashion-mnist" in done.stdout


def test_output_that_cannot_be_written() -> None:
    command = [sys.executable, "-m", "fedseal", "presets"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr == "error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    "key", ["rounds", "labels", "evaluate", "validation_accuracy", "versions", "seconds"]
)
@pytest.mark.parametrize("value", [None, [], "text"])
def test_a_summary_with_wrong_values_is_refused(
    fedseal: Command, copy: Path, key: str, value: object
) -> None:
    path = copy / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    fedseal("report", copy).refuses(f"{copy} does not contain a finished run: its summary.json is missing or")
