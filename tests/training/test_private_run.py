"""Whole runs with differential privacy: on all engines, resumed, reported, and refused."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fedseal as library
from conftest import TINY, Command, contents
from fedseal.errors import UserError
from fedseal.methods import METHODS
from fedseal.privacy import spent_epsilon
from fedseal.rounds import RoundDone
from fedseal.storage.events_file import read_events

PRIVATE: dict[str, Any] = {**TINY, "privacy.mode": "central", "privacy.noise": 2.0, "privacy.clip": 0.01}


def events(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == "round"]


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in central mode. Tests must not modify it."""
    return library.train("fmnist-lenet", out=tmp_path_factory.mktemp("private"), options=PRIVATE).folder


def test_epsilon_is_in_all_outputs(private: Path, fedseal: Command, tmp_path: Path) -> None:
    """Two rounds with σ = 2 spend ε = 1.993, then 2.943."""
    assert [round(event["epsilon"], 3) for event in events(private)] == [1.993, 2.943]
    summary = json.loads((private / "summary.json").read_text())["privacy"]
    assert summary == {
        "mode": "central", "clip": 0.01, "noise": 2.0, "delta": 1e-5,
        "epsilon": spent_epsilon(2.0, 2, 1e-5), "uploads": 2,
    }  # fmt: skip
    words = "ε = 2.94 at δ = 1e-05 for each client (central, clip 0.01, noise 2, up to 2 uploads)"
    report = (private / "report.html").read_text()
    assert (
        "Differential privacy" in report and words in report and "a repeated run has other results" in report
    )
    assert fedseal("export", private, "--format", "safetensors", "--out", tmp_path / "model").code == 0
    assert f"| differential privacy | {words} |" in (tmp_path / "model" / "README.md").read_text()


def test_epsilon_is_shown_while_a_run_goes_on(tmp_path: Path, fedseal: Command) -> None:
    answer = fedseal("train", "fmnist-lenet", "--out", tmp_path / "run", options=PRIVATE)
    assert answer.code == 0 and "· ε 2.94" in answer.out


@pytest.mark.parametrize("mode", ["central", "local"])
def test_counts_do_not_travel(mode: str, tmp_path: Path) -> None:
    """A plain run tells |D⁺| and |D⁻|. Correct rates come from the simulation, not from clients."""
    library.train("fmnist-lenet", out=tmp_path / "run", options={**PRIVATE, "privacy.mode": mode})
    for event in events(tmp_path / "run"):
        assert "positive" not in event and "negative" not in event and event["left_out"] == []


@pytest.mark.parametrize("mode", ["central", "local"])
def test_noise_differs_between_runs_of_one_seed(mode: str, tmp_path: Path) -> None:
    """Without noise, clipped runs are the same to the bit."""
    for noise, same in ((0.0, True), (1.0, False)):
        models: list[dict[str, torch.Tensor]] = []
        for name in ("one", "other"):
            options = {**PRIVATE, "rounds": 1, "privacy.mode": mode, "privacy.noise": noise}
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            library.train("fmnist-lenet", out=tmp_path / name, options=options, observers=[Averages(models)])
        assert all(torch.equal(models[0][k], models[1][k]) for k in models[0]) is same


class Averages:
    """Keeps the clients' average of each round."""

    def __init__(self, found: list[dict[str, torch.Tensor]]) -> None:
        self.found = found

    def __call__(self, event: object) -> None:
        if isinstance(event, RoundDone):
            self.found.append(event.state.tensors["average"])

    def close(self) -> None: ...


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"server-sl", "fedmatch", "fedrgd"}))
def test_method_sees_only_the_noisy_mean(name: str, tmp_path: Path) -> None:
    """With a clip near 0 nothing is left of the clients' work: each method ends where its server leads it."""
    options = {**PRIVATE, "method": name, "privacy.clip": 1e-9, "privacy.noise": 0.0, "rounds": 1}
    options |= {f"{other}.threshold": 0.0 for other in ("fedavg-fixmatch", "fedrgd", "semifl", "fedavg-uda")}
    options |= {"bootstrap.epochs": 1} if name == "fedshift" else {}
    found: list[dict[str, torch.Tensor]] = []
    library.train("fmnist-lenet", out=tmp_path / "private", options=options, observers=[Averages(found)])
    library.train(
        "fmnist-lenet",
        out=tmp_path / "lazy",
        options={k: v for k, v in options.items() if "privacy" not in k} | {"client.epochs": 0},
        observers=[Averages(found)],
    )
    for tensor, value in found[0].items():
        torch.testing.assert_close(value, found[1][tensor], atol=1e-6, rtol=0)


def test_method_that_uploads_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS["fedseal"], "also_uploads", ("extra",))
    with pytest.raises(UserError, match=r"fedseal also uploads extra, which \[privacy\] does not cover"):
        library.train("fmnist-lenet", out=tmp_path / "run", options=PRIVATE)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"method": "fedmatch"}, "fedmatch needs the replies of single clients"),
        ({"method": "fedrgd"}, "fedrgd needs the replies of single clients"),
        ({"aggregate.rule": "median"}, 'aggregate.rule = "median" compares the uploads of single clients'),
        ({"secure.enabled": True}, "secure aggregation hides the updates that the server has to clip"),
    ],
)
def test_central_mode_refuses_what_needs_more_than_the_mean(
    keys: dict[str, Any], words: str, tmp_path: Path
) -> None:
    options = {**PRIVATE, "server.momentum": 0.0, "client.momentum": 0.0, **keys}
    with pytest.raises(UserError, match=f'{words}, which privacy.mode = "central" rules out'):
        library.train("fmnist-lenet", out=tmp_path / "run", options=options)
    assert not (tmp_path / "run").exists()
    library.train("fmnist-lenet", out=tmp_path / "run", options={**options, "privacy.mode": "local"})
    assert [round(event["epsilon"], 3) for event in events(tmp_path / "run")] == [1.993, 2.943]


def test_both_engines_and_workers_upload_alike(tmp_path: Path) -> None:
    """Without noise, clipped uploads give one result on all engines."""
    pytest.importorskip("flwr")
    models: list[dict[str, torch.Tensor]] = []
    for number, engine in enumerate(({"engine.name": "flower"}, {"engine.workers": 2})):
        options = {**PRIVATE, "rounds": 1, "privacy.mode": "local", "privacy.noise": 0.0, **engine}
        folder = tmp_path / str(number)
        library.train("fmnist-lenet", out=folder, options=options, observers=[Averages(models)])
    assert all(torch.equal(models[0][k], models[1][k]) for k in models[0])


def test_resumed_run_counts_what_was_spent(private: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(private, tmp_path / "run"))
    library.train("fmnist-lenet", out=folder, options={**PRIVATE, "rounds": 3}, resume=True)
    assert [round(event["epsilon"], 3) for event in events(folder)] == [1.993, 2.943, 3.709]


def test_run_beyond_its_budget_does_not_start(tmp_path: Path, fedseal: Command) -> None:
    options = {**PRIVATE, "privacy.epsilon": 2.5}
    answer = fedseal("train", "fmnist-lenet", "--out", tmp_path / "run", options=options)
    answer.refuses(
        "privacy.epsilon is 2.5, but 2 rounds spend ε = 2.943 at δ = 1e-05: lower rounds to 1 or raise"
    )
    assert not (tmp_path / "run").exists()


def test_missing_accountant(tmp_path: Path, fedseal: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)  # as if it were not installed
    answer = fedseal("train", "fmnist-lenet", "--out", tmp_path / "run", options=PRIVATE)
    answer.refuses("dp_accounting is not installed: install fedseal with its extra 'privacy'.")
    assert not (tmp_path / "run").exists()


def test_more_rounds_than_the_budget_are_refused_on_resume(tmp_path: Path, fedseal: Command) -> None:
    options = {**PRIVATE, "privacy.epsilon": 3.0}
    assert fedseal("train", "fmnist-lenet", "--out", tmp_path, "--quiet", options=options).code == 0
    before = contents(tmp_path)
    more = fedseal("train", "fmnist-lenet", "--out", tmp_path, "--resume", options={**options, "rounds": 3})
    more.refuses("privacy.epsilon is 3, but 3 rounds spend ε = 3.709 at δ = 1e-05: lower rounds to 2.")
    after = contents(tmp_path)
    assert {name: after[name] for name in before if "checkpoint/" not in name} == {
        name: value for name, value in before.items() if "checkpoint/" not in name
    }


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"privacy.noise": 2.0}, "mode is none, so the other keys have no effect"),
        ({"privacy.mode": "central", "privacy.noise": 0, "privacy.epsilon": 1}, "without noise every budget"),
        ({"privacy.mode": "local", "privacy.noise": 1e-5}, "noise and epsilon must be 0 or at least 0.001"),
        ({"privacy.mode": "local", "privacy.epsilon": 1e-9}, "noise and epsilon must be 0 or at least 0.001"),
        ({"privacy.mode": "secret"}, "'privacy.mode' is 'secret'"),
        ({"privacy.mode": "central", "privacy.clip": 0}, "'privacy.clip' is 0"),
        ({"privacy.mode": "central", "privacy.delta": 1}, "'privacy.delta' is 1"),
    ],
)
def test_bad_settings_are_refused(keys: dict[str, Any], words: str, fedseal: Command) -> None:
    fedseal("show", "fmnist-lenet", options=keys).refuses(words)
