"""A run in MLflow: in a folder, resumed, and with a server that is gone."""

import logging
from pathlib import Path
from typing import Any

import pytest

from conftest import Command
from fedseal.config.load import load_config
from fedseal.core import Packet
from fedseal.rounds import RoundDone
from fedseal.storage.events_file import read_rounds
from fedseal.training.mlflow_tracker import MLflow
from fedseal.training.train import train

mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")


def test_a_run_and_its_continuation_are_one_mlflow_run(
    fedseal: Command, tiny: dict[str, Any], tmp_path: Path
) -> None:
    store, run = tmp_path / "a store", tmp_path / "run"
    keys = tiny | {"fedseal.bootstrap_epochs": 1, "engine.checkpoint_every": 2}

    class Stop:
        def __call__(self, event: object) -> None:
            if isinstance(event, RoundDone) and event.t == 3:
                raise RuntimeError("stop")

        def close(self) -> None: ...

    config = load_config("fmnist-lenet", keys | {"rounds": 4})
    with pytest.raises(RuntimeError, match="stop"):
        train(config, out=run, observers=[MLflow(str(store), config, run), Stop()])
    client = mlflow.MlflowClient(store.as_uri())
    experiment = client.get_experiment_by_name("fedseal").experiment_id
    [found] = client.search_runs([experiment])
    assert found.info.status == "KILLED"

    words = ("train", run / "config.toml", "--out", run, "--resume", "--mlflow", store)
    answer = fedseal(*words)
    assert (answer.code, answer.err) == (0, "")
    [found] = client.search_runs([experiment])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert found.data.params["method"] == "fedseal" and found.data.params["data.clients"] == "3"
    rounds = read_rounds(run)
    for name, key in (("test_accuracy", "accuracy/test_accuracy"), ("positive", "method/positive")):
        points = client.get_metric_history(found.info.run_id, key)
        assert [(p.step, p.value) for p in points] == [(event["t"], event[name]) for event in rounds]
    [artifact] = client.list_artifacts(found.info.run_id)
    copy = client.download_artifacts(found.info.run_id, artifact.path, str(tmp_path))
    assert Path(copy).read_bytes() == (run / "model.safetensors").read_bytes()


def test_a_run_that_was_stopped_after_its_last_round(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, run = tmp_path / "store", tmp_path / "run"
    config = load_config("fmnist-lenet", tiny)

    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("fedseal.training.train.save_model", stop)
        train(config, out=run, observers=[MLflow(str(store), config, run)])
    client = mlflow.MlflowClient(store.as_uri())
    experiment = client.get_experiment_by_name("fedseal").experiment_id
    for status in ("KILLED", "FINISHED"):
        [found] = client.search_runs([experiment])
        assert found.info.status == status
        train(config, out=run, resume=True, observers=[MLflow(str(store), config, run)])
    assert [file.path for file in client.list_artifacts(found.info.run_id)] == ["model.safetensors"]


def test_a_store_that_cannot_be_used_is_named_before_training(
    fedseal: Command, tiny: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    words = ("train", "fmnist-lenet", "--out", tmp_path / "run", "--mlflow")
    fedseal(*words, tmp_path / "file", options=tiny).refuses("MLflow cannot use", "file'")
    fedseal(*words, "nonsense://here", options=tiny).refuses("MLflow cannot use 'nonsense://here'")
    (tmp_path / "photos" / "holiday").mkdir(parents=True)
    answer = fedseal(*words, tmp_path / "photos", options=tiny)
    answer.refuses("photos is no MLflow store, because it holds the folder holiday: give a new folder.")
    assert not (tmp_path / "run").exists()
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["holiday"]


def test_a_store_that_fails_later_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, store = load_config("fmnist-lenet"), tmp_path / "store"
    tracker = MLflow(str(store), config, tmp_path / "run")
    for path in sorted(store.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    for t in (1, 2):
        tracker(RoundDone(t, {"t": t, "seconds": {"server": 1.0}}, Packet()))
    tracker.close()
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "the run goes on without it" in warning.getMessage()
