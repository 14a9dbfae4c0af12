"""User-defined methods: the example of docs/new-method.md on both engines, its metrics, and errors."""

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import TINY, Command, same_weights
from fedseal.config.load import load_config
from fedseal.storage.events_file import read_rounds
from fedseal.training.train import server_only, train


def settings(path: Path, **more: Any) -> dict[str, Any]:
    keys = {"method": f"{path}:FedProxMatch", "FedProxMatch.threshold": 0.1, "FedProxMatch.mu": 0.5}
    return {**TINY, "server.lr": 0.01, "server.threads": 1, **keys, **more}


def test_same_weights_with_workers_on_flower_and_after_a_resume(own_method: Path, tmp_path: Path) -> None:
    train("fmnist-lenet", out=tmp_path / "one", options=settings(own_method))
    train("fmnist-lenet", out=tmp_path / "two", options=settings(own_method, rounds=1))
    more = {"resume": True, "options": settings(own_method, **{"engine.workers": 2})}
    train("fmnist-lenet", out=tmp_path / "two", **more)
    train("fmnist-lenet", out=tmp_path / "flower", options=settings(own_method, **{"engine.name": "flower"}))
    assert same_weights(tmp_path / "one", tmp_path / "two")
    assert same_weights(tmp_path / "one", tmp_path / "flower")
    again = train(tmp_path / "one" / "config.toml", out=tmp_path / "again")
    assert same_weights(tmp_path / "one", again.folder)
    other = train(
        "fmnist-lenet", out=tmp_path / "mu", options=settings(own_method, **{"FedProxMatch.mu": 50})
    )
    assert not same_weights(tmp_path / "one", other.folder)  # the option has an effect


def test_baseline_is_server_sl(own_method: Path) -> None:
    config = load_config("fmnist-lenet", settings(own_method))
    assert server_only(config).method == "server-sl"


def test_fingerprint_depends_on_the_content_of_the_file_and_not_on_its_path(
    own_method: Path, tmp_path: Path
) -> None:
    before = load_config("fmnist-lenet", settings(own_method)).fingerprint()
    moved = own_method.rename(tmp_path / "other.py")
    assert load_config("fmnist-lenet", settings(moved)).fingerprint() == before
    moved.write_text(moved.read_text("utf-8") + "\n# changed\n", "utf-8")
    assert load_config("fmnist-lenet", settings(moved)).fingerprint() != before


def test_relative_path_starts_at_the_working_directory(
    own_method: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("fmnist-lenet", {"method": "fedprox.py:FedProxMatch"})
    assert config.method == f"{own_method.resolve()}:FedProxMatch"
    assert "[FedProxMatch]" in config.to_toml()


@pytest.mark.parametrize(
    ("text", "word", "parts"),
    [
        (None, "my.py:Mine", ["Cannot read the Python file", "my.py"]),
        ("x = (", "my.py:Mine", ["my.py", "SyntaxError"]),
        ("raise RuntimeError('no')", "my.py:Mine", ["my.py", "RuntimeError: no"]),
        ("x = 1", "my.py:Mine", ["my.py", "no class Mine"]),
        ("class Mine: ...", "my.py:Mine", ["my.py", "fedseal.core.Method"]),
        (
            "from fedseal.core import Method\nclass Mine(Method): ...",
            "my.py:Mine",
            ["must also define client_round"],
        ),
        ("x = 1", "my.py", ["FILE.py:Class", "fedseal"]),
        ("x = 1", "my.py:", ["FILE.py:Class"]),
        ("x = 1", "my.py:data", ["rename the class data"]),
    ],
)
def test_error_names_the_bad_file(
    text: str | None,
    word: str,
    parts: list[str],
    fedseal: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("my.py").write_text(text, "utf-8")
    fedseal("train", "fmnist-lenet", "--out", "run", options={"method": word}).refuses(*parts)
    assert not Path("run").exists()


def test_error_names_the_unknown_option(own_method: Path, fedseal: Command) -> None:
    keys = {"method": f"{own_method}:FedProxMatch", "FedProxMatch.nu": 1}
    fedseal("train", "fmnist-lenet", options=keys).refuses("FedProxMatch.nu", "choose from threshold, mu")


def test_its_numbers_reach_all_outputs(own_method: Path, fedseal: Command, tmp_path: Path) -> None:
    """Counts, correct rates and metrics are in the events, the progress bar, TensorBoard and the report."""
    run = tmp_path / "run"
    shown = fedseal("train", "fmnist-lenet", "--out", run, options=settings(own_method))
    assert shown.code == 0, shown.err
    events = read_rounds(run)
    for event in events:
        assert 0 < event["confident"] <= 120 and 0 <= event["confident_correct"] <= 1 and event["drift"] > 0
    last = events[-1]
    rate = f"{last['confident_correct']:.0%}"
    status = f"confident images {last['confident']:,} ({rate} correct)"
    assert status in shown.out
    assert f"distance of the average from the global model {last['drift']:.3g}" in shown.out

    board = EventAccumulator(str(run / "tensorboard")).Reload()
    assert {"method/confident", "method/confident_correct", "method/drift"} <= set(board.Tags()["scalars"])
    assert [event.value for event in board.Scalars("method/drift")] == pytest.approx(
        [event["drift"] for event in events]
    )
    page = (run / "report.html").read_text("utf-8")
    assert "confident images" in page and "istance of the average from the global model" in page


def write_method(path: Path, step: str, *lines: str) -> dict[str, Any]:
    """FixMatch with another body of one of its steps, as a method of your own."""
    head = ["from fedseal.methods.fedavg_fixmatch import FedAvgFixMatch", "class Mine(FedAvgFixMatch):"]
    body = [f"    def {step}(self, *given):", *(f"        {line}" for line in lines)]
    path.write_text("\n".join([*head, *body, ""]), "utf-8")
    return {**TINY, "method": f"{path}:Mine", "Mine.threshold": 0.1}


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_your_own_code_names_its_line(workers: int, fedseal: Command, tmp_path: Path) -> None:
    keys = write_method(tmp_path / "mine.py", "client_round", "raise KeyError('my bug')")
    answer = fedseal(
        "train", "fmnist-lenet", "--out", tmp_path / "run", options={**keys, "engine.workers": workers}
    )
    answer.refuses(f"{tmp_path / 'mine.py'}, line 4, in client_round: KeyError: 'my bug' (details in ")


@pytest.mark.parametrize(
    ("step", "line", "reason"),
    [
        ("initial_state", "return None", "initial_state must return a Packet with the group 'model'"),
        ("server_round", "return given[1]", "server_round must return the state, and requests by client"),
        ("server_round", "return given[1], {99: given[1]}", "but not for client 99"),
        ("client_round", "return given[0]", "client_round must return two packets, reply and memory"),
        ("collect", "return given[2]", "collect must return a Packet with the group 'model'"),
        (
            "client_round",
            "import numpy; return given[0], type(given[0])({}, {'found': numpy.int64(3)})",
            "the scalar 'found' of a packet is a int64, not a bool, int, float or str",
        ),
        ("metrics", "return {'seconds': 1.0}", "the metric name 'seconds' is reserved"),
        ("metrics", "return {'drift': None}", "the metric 'drift' is None, but must be a number"),
        ("metrics", "return {'drift': [[1.0]]}", "the metric 'drift' is [[1.0]], but must be a number"),
        ("metrics", "return 5", "metrics must return numbers by name, not 5"),
    ],
)
def test_what_a_step_must_not_return(
    step: str, line: str, reason: str, fedseal: Command, tmp_path: Path
) -> None:
    keys = write_method(tmp_path / "mine.py", step, line)
    fedseal("train", "fmnist-lenet", "--out", tmp_path / "run", options=keys).refuses(reason)
    events = tmp_path / "run" / "events.jsonl"
    assert not events.exists() or not read_rounds(tmp_path / "run")


def test_a_finished_run_does_not_stand_for_changed_code(
    own_method: Path, fedseal: Command, tmp_path: Path
) -> None:
    """The other case, an unfinished run, is refused with its checkpoint."""
    file = tmp_path / "mine.py"
    file.write_text(own_method.read_text("utf-8"), "utf-8")
    words = ("train", "fmnist-lenet", "--out", tmp_path / "run", "--resume")
    assert fedseal(*words, options=settings(file)).code == 0
    assert fedseal(*words, options=settings(file)).code == 0
    file.write_text(own_method.read_text("utf-8") + "# changed", "utf-8")
    fedseal(*words, options=settings(file)).refuses(f"was trained before {file} was changed")
    fedseal(*words, options=settings(file, rounds=9)).refuses("another text of your own Python files")
