"""`fedseal.train`: the files of a run, reproducing and resuming it, and using its model."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import fedseal
from conftest import contents, same_weights
from fedseal.config.config import Config
from fedseal.config.load import load_config
from fedseal.data.federation import load_federation
from fedseal.errors import UserError
from fedseal.rounds import RoundDone
from fedseal.storage.events_file import read_events
from fedseal.storage.run_folder import default_folder
from fedseal.system.files import lock_run
from fedseal.training.evaluate import evaluate
from fedseal.training.train import server_only, train


def events(run: Path) -> list[dict[str, Any]]:
    return read_events(run / "events.jsonl")


def without_times(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key != "seconds"}


def test_run_folder_is_complete(finished: Path) -> None:
    names = {"config.toml", "events.jsonl", "summary.json", "model.safetensors", "checkpoint", "tensorboard"}
    names.add("report.html")
    assert {path.name for path in finished.iterdir()} == names
    assert (finished / "checkpoint" / "state.safetensors").is_file()
    assert any(path.stat().st_size > 500 for path in (finished / "tensorboard").iterdir())
    umask_allows_reading = (finished / "tensorboard").stat().st_mode & 0o044
    assert (finished / "model.safetensors").stat().st_mode & 0o044 == umask_allows_reading


def test_round_events_are_complete(finished: Path) -> None:
    keys = {"t", "test_accuracy", "average_test_accuracy", "tau", "positive", "negative", "positive_correct"}
    keys |= {"negative_correct", "bytes_down", "bytes_up", "seconds"}
    rounds = events(finished)
    assert [event["t"] for event in rounds] == [1, 2]
    for event in rounds:
        assert event["event"] == "round" and keys <= event.keys()
        assert 0 < event["positive"] + event["negative"] <= 120
        assert len(event["tau"]) == 10 and event["left_out"] == []
        for name in ("test_accuracy", "average_test_accuracy", "positive_correct", "negative_correct"):
            assert 0 <= event[name] <= 1
        weights = 4 * 61_706  # bytes of LeNet, sent to and from each of three clients
        for name in ("bytes_down", "bytes_up"):
            assert 3 * weights < event[name] < 3 * weights + 10_000
        assert event["seconds"].keys() == {"server", "clients", "evaluation"}


def test_summary_describes_the_run(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    config, rounds = load_config(finished / "config.toml"), events(finished)
    measured = [event["test_accuracy"] for event in rounds]
    best = max(rounds, key=lambda event: (event["validation_accuracy"], -event["t"]))
    assert summary["test_accuracy"] == {
        "last": measured[-1],
        "mean_last_10": pytest.approx(np.mean(measured)),
        "best_on_validation": best["test_accuracy"],
        "best_round": best["t"],
    }
    assert summary["labels"] == {"training": 50, "validation": 20, "total": 70}
    assert (summary["method"], summary["rounds"], summary["seed"], summary["clients"]) == ("fedseal", 2, 0, 3)
    assert summary["config"] == config.fingerprint() and len(summary["split"]) == 16
    assert summary["versions"].keys() == {"fedseal", "torch", "numpy", "python", "machine", "processor"}
    assert summary["arithmetic"] == "portable"
    assert summary["seconds"] > 0 and summary["skipped_files"] == 0 and summary["left_out"] == {}


def test_accuracy_is_the_mean_over_the_last_ten_rounds_for_any_evaluate_every(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    keys = tiny | {"method": "server-sl", "evaluate_every": 2}
    run = train("fmnist-lenet", out=tmp_path / "run", options=keys, rounds=14)
    seen = {event["t"]: event["test_accuracy"] for event in events(run.folder) if "test_accuracy" in event}
    assert list(seen) == [2, 4, *range(5, 15)]
    assert run.accuracy == pytest.approx(np.mean(list(seen.values())[2:]))
    # of the last ten rounds up to round 12, which are 3 to 12, rounds 4 to 12 were evaluated
    assert run.accuracy_after(12) == pytest.approx(np.mean(list(seen.values())[1:10]))


class StopAfter:
    """Ctrl-C when a round has ended."""

    def __init__(self, t: int) -> None:
        self.t = t

    def __call__(self, event: object) -> None:
        if isinstance(event, RoundDone) and event.t == self.t:
            raise KeyboardInterrupt

    def close(self) -> None: ...


def test_another_number_of_rounds_needs_accuracies_of_the_last_ten(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    """Of 14 rounds, 4 to 14 are evaluated; a run of 16 does not look at rounds 5 and 6.

    Of the first 15 rounds of 60, only 4, 8 and 12 are evaluated. A run of 24 rounds needs round 15.
    """
    keys = tiny | {"method": "server-sl", "evaluate_every": 4}
    train("fmnist-lenet", out=tmp_path / "run", options=keys, rounds=14)
    longer = train("fmnist-lenet", out=tmp_path / "run", options=keys, rounds=16, resume=True)
    direct = train("fmnist-lenet", out=tmp_path / "direct", options=keys, rounds=16)
    assert without_times(longer.summary) == without_times(direct.summary)
    stopped: dict[str, Any] = {"out": tmp_path / "stopped", "options": keys}
    with pytest.raises(KeyboardInterrupt):
        train("fmnist-lenet", **stopped, rounds=60, observers=[StopAfter(15)])
    for rounds in (15, 24):
        with pytest.raises(UserError, match=r"needs accuracies of round .* set rounds to at least 25\.$"):
            train("fmnist-lenet", **stopped, rounds=rounds, resume=True)
    train("fmnist-lenet", **stopped, rounds=25, resume=True)


def test_report_of_a_longer_run_is_written_after_a_stop(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    keys: dict[str, Any] = {"out": copy, "rounds": 3, "resume": True}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("fedseal.training.train.write_report", stop)
        train(copy / "config.toml", **keys)
    assert (copy / "summary.json").exists() and not (copy / "report.html").exists()
    train(copy / "config.toml", **keys)
    assert (copy / "report.html").exists()


def test_other_arithmetic_is_refused(copy: Path) -> None:
    with pytest.raises(UserError, match=r"engine\.arithmetic = 'portable', which changes the last bits"):
        train(copy / "config.toml", out=copy, resume=True, options={"engine.arithmetic": "native"})


def test_model_file_describes_the_model(finished: Path) -> None:
    with safe_open(finished / "model.safetensors", framework="pt") as file:
        metadata = json.loads(file.metadata()["fedseal"])
    assert metadata["classes"][0] == "T-shirt/top" and len(metadata["classes"]) == 10
    assert (metadata["size"], metadata["channels"], metadata["model"]["name"]) == (28, 1, "lenet")
    assert 40 < metadata["mean"][0] < 110 and 60 < metadata["std"][0] < 120


def test_config_toml_reproduces_the_run_to_the_bit(finished: Path, tmp_path: Path) -> None:
    again = train(finished / "config.toml", out=tmp_path / "again")
    assert same_weights(finished, again.folder)
    assert (again.folder / "config.toml").read_text() == (finished / "config.toml").read_text()
    before = json.loads((finished / "summary.json").read_text())
    assert without_times(again.summary) == without_times(before)
    assert again.accuracy == before["test_accuracy"]["mean_last_10"]
    for one, other in zip(events(finished), events(again.folder), strict=True):
        assert without_times(one) == without_times(other)


def test_finished_run_is_not_repeated(finished: Path) -> None:
    before = contents(finished)
    result = train(finished / "config.toml", out=finished, resume=True)
    assert result.summary == json.loads((finished / "summary.json").read_text())
    assert contents(finished) == before


def test_resuming_with_more_rounds_equals_one_long_run(finished: Path, copy: Path, tmp_path: Path) -> None:
    resumed = train(finished / "config.toml", out=copy, resume=True, rounds=4)
    whole = train(finished / "config.toml", out=tmp_path / "whole", rounds=4)
    assert same_weights(copy, whole.folder) and not same_weights(copy, finished)
    assert without_times(resumed.summary) == without_times(whole.summary)
    assert [event["t"] for event in events(copy)] == [1, 2, 3, 4]
    assert load_config(copy / "config.toml").rounds == 4


@pytest.mark.parametrize("chosen", ["model", "average"])
def test_evaluate_agrees_with_the_summary(tiny: dict[str, Any], tmp_path: Path, chosen: str) -> None:
    result = train("fmnist-lenet", out=tmp_path / "run", options=tiny, rounds=1, evaluate=chosen)
    again = evaluate(tmp_path / "run")
    prefix = {"model": "", "average": "average_"}[chosen]
    assert again.keys() == {f"{prefix}test_accuracy", f"{prefix}validation_accuracy"}
    assert all(value == result.summary[name]["last"] for name, value in again.items())
    assert result.accuracy == result.summary[f"{prefix}test_accuracy"]["mean_last_10"]


def test_classifier_agrees_with_the_summary(finished: Path, tmp_path: Path) -> None:
    config = load_config(finished / "config.toml")
    federation = load_federation(config.data, config.seed)
    rows = federation.tests["test"]
    classifier = fedseal.load(finished)
    confidences = classifier(torch.from_numpy(federation.pool.pixels[rows].copy()))
    assert torch.allclose(confidences.sum(dim=1), torch.ones(len(rows)))
    accuracy = (confidences.argmax(dim=1).numpy() == federation.pool.labels[rows]).mean()
    assert accuracy == json.loads((finished / "summary.json").read_text())["test_accuracy"]["last"]

    path = tmp_path / "image.png"
    Image.fromarray(federation.pool.pixels[rows[0], 0]).save(path)
    found = classifier.predict([path])
    [name], [confidence] = found.labels, found.confidences
    assert classifier.classes.index(name) == confidences[0].argmax()
    assert confidence == pytest.approx(float(confidences[0].max()), abs=1e-6)


def test_baseline_has_the_same_split(tiny: dict[str, Any], tmp_path: Path) -> None:
    config = load_config("fmnist-lenet", tiny)
    base = server_only(config)
    assert base.method == "server-sl" and (base.data, base.server) == (config.data, config.server)
    assert base.rounds == 2 + 5  # one epoch per round
    result = train(base, out=tmp_path / "base")
    assert result.summary["split"] == load_federation(config.data, config.seed).fingerprint
    assert result.summary["method"] == "server-sl" and "average_test_accuracy" not in result.summary


def test_baseline_of_a_bootstrapped_method_trains_as_long_with_the_same_rates() -> None:
    """4 teachers of 300 epochs are 1,200 epochs, 30 in each of 40 rounds; and one epoch of the server."""
    config = load_config("demo")
    base = server_only(config)
    assert (base.method, base.rounds, base.server.epochs) == ("server-sl", 40, 31)
    assert (base.server.lr, base.server.augment) == (config.bootstrap.lr, "strong")
    assert base.server.decay**40 == pytest.approx(config.bootstrap.decay**300)


def test_default_folder() -> None:
    def folder(*source: str, **keys: object) -> str:
        return str(default_folder("fmnist-lenet", load_config("fmnist-lenet", keys), *source))

    assert (
        folder(seed=3) == "runs/fmnist-lenet-seed3" and folder("-served") == "runs/fmnist-lenet-served-seed0"
    )
    assert folder(method="semifl") == "runs/fmnist-lenet-semifl-seed0"
    config = load_config("fmnist-lenet", {"method": "server-sl"})
    assert str(default_folder(config, config)) == "runs/server-sl-seed0"


def test_default_folder_of_a_file_that_needs_more_keys(tmp_path: Path, own: dict[str, Any]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[data]\nsource = "folders"\n')
    assert str(default_folder(file, load_config(file, own))) == "runs/mine-seed0"


def test_data_path_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("images", Path("images")):
        data = {"source": "folders", "path": path}
        assert Config.model_validate({"data": data}).data.path == str(tmp_path / "images")
    assert load_config("folders", {"data.path": "~nobody-at-all/x"}).data.path.endswith("~nobody-at-all/x")


def test_errors_name_the_bad_argument(tiny: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"unknown key 'round' \(did you mean 'rounds'\?\)"):
        fedseal.train("fmnist-lenet", round=3)
    with pytest.raises(UserError, match="A Config takes no further keys"):
        fedseal.train(load_config("fmnist-lenet", tiny), rounds=3)


def test_folders_have_a_default_size(own: dict[str, Any], shapes: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'[data]\nsource = "folders"\npath = "{shapes}"\n')
    config = load_config(path)
    assert load_federation(config.data, config.seed).pool.pixels.shape[1:] == (3, 32, 32)


def test_script_without_a_main_guard(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Worker processes must not run the user's script again. PyTorch's compiler must not be loaded either: it
    would double the start-up time of every process."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
            import fedseal, sys
            print("begin")
            result = fedseal.train("fmnist-lenet", out="run", options={tiny | {"engine.workers": 2}!r})
            print("end", result.summary["rounds"], "torch._dynamo" in sys.modules)
        """)
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["begin", "end", "2", "False"]), done.stderr
    train("fmnist-lenet", out=tmp_path / "here", options=tiny)
    assert same_weights(tmp_path / "run", tmp_path / "here")  # two workers or none


def test_only_one_process_can_train_in_a_folder(tiny: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train("fmnist-lenet", out=run, options=tiny, rounds=1)
    with lock_run(run), pytest.raises(UserError, match="run is in use: another process"):
        train("fmnist-lenet", out=run, options=tiny, rounds=2, resume=True)
    assert train("fmnist-lenet", out=run, options=tiny, rounds=2, resume=True).summary["rounds"] == 2
