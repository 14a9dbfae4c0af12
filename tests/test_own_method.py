"""A method of one's own: the very file of docs/new-method.md, on both engines, and what can go wrong."""

import re
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY, Command, same_weights
from fedseal import api
from fedseal.config import load_config
from fedseal.core import Packet
from fedseal.methods import METHODS, find
from fedseal.sites import Sites

DOCS = Path(__file__).parent.parent / "docs" / "new-method.md"


@pytest.fixture
def own_method(tmp_path: Path) -> Path:
    """The file that the docs build."""
    [text] = re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    assert text.count("\n") < 60
    path = tmp_path / "fedprox.py"
    path.write_text(text, "utf-8")
    return path


def settings(path: Path, **more: Any) -> dict[str, Any]:
    keys = {"method": f"{path}:FedProxMatch", "FedProxMatch.threshold": 0.1, "FedProxMatch.mu": 0.5}
    return {**TINY, "server.lr": 0.01, "server.threads": 1, **keys, **more}


def test_it_runs_in_workers_on_flower_and_after_a_resume(own_method: Path, tmp_path: Path) -> None:
    api.train("fmnist-lenet", out=tmp_path / "one", set=settings(own_method))
    api.train("fmnist-lenet", out=tmp_path / "two", set=settings(own_method, rounds=1))
    more = {"resume": True, "set": settings(own_method, **{"engine.workers": 2})}
    api.train("fmnist-lenet", out=tmp_path / "two", **more)
    flower = {"engine.name": "flower", "engine.workers": 2}
    api.train("fmnist-lenet", out=tmp_path / "flower", set=settings(own_method, **flower))
    assert same_weights(tmp_path / "one", tmp_path / "two")
    assert same_weights(tmp_path / "one", tmp_path / "flower")
    again = api.train(tmp_path / "one" / "config.toml", out=tmp_path / "again")
    assert same_weights(tmp_path / "one", again.folder)
    other = api.train(
        "fmnist-lenet", out=tmp_path / "mu", set=settings(own_method, **{"FedProxMatch.mu": 50})
    )
    assert not same_weights(tmp_path / "one", other.folder)  # its options do something


def test_its_baseline_is_server_sl(own_method: Path) -> None:
    config = load_config("fmnist-lenet", settings(own_method))
    assert api.baseline(config).method == "server-sl"


def test_a_changed_file_is_another_configuration_and_a_moved_one_is_not(
    own_method: Path, tmp_path: Path
) -> None:
    before = load_config("fmnist-lenet", settings(own_method)).fingerprint()
    moved = own_method.rename(tmp_path / "other.py")
    assert load_config("fmnist-lenet", settings(moved)).fingerprint() == before
    moved.write_text(moved.read_text("utf-8") + "\n# changed\n", "utf-8")
    assert load_config("fmnist-lenet", settings(moved)).fingerprint() != before


def test_a_relative_path_is_from_where_one_is(
    own_method: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("fmnist-lenet", {"method": "fedprox.py:FedProxMatch"})
    assert config.method == f"{own_method.resolve()}:FedProxMatch"
    assert "[FedProxMatch]" in config.to_toml()


@pytest.mark.parametrize(
    ("text", "word", "parts"),
    [
        (None, "my.py:Mine", ["my.py", "cannot be read"]),
        ("x = (", "my.py:Mine", ["my.py", "SyntaxError"]),
        ("raise RuntimeError('no')", "my.py:Mine", ["my.py", "RuntimeError: no"]),
        ("x = 1", "my.py:Mine", ["my.py", "no class Mine"]),
        ("class Mine: ...", "my.py:Mine", ["my.py", "fedseal.core.Method"]),
        ("from fedseal.core import Method\nclass Mine(Method): ...", "my.py:Mine", ["lacks client_round"]),
        ("x = 1", "my.py", ["FILE.py:Class", "fedseal"]),
        ("x = 1", "my.py:", ["FILE.py:Class"]),
        ("x = 1", "my.py:data", ["cannot be called data"]),
    ],
)
def test_bad_files_are_named(
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
    fedseal("train", "demo", "--out", "run", set={"method": word}).refuses(*parts)
    assert not Path("run").exists()


def test_a_wrong_option_is_named(own_method: Path, fedseal: Command) -> None:
    keys = {"method": f"{own_method}:FedProxMatch", "FedProxMatch.nu": 1}
    fedseal("train", "demo", set=keys).refuses("FedProxMatch.nu", "known are threshold, mu")


def test_a_client_loads_its_own_copy_and_none_that_the_server_names(
    own_method: Path, own: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("flwr")
    from fedseal.engines import flower_client
    from fedseal.engines.flower import job_of

    keys = own | {"data.path": str(own["data.path"]), "method": f"{own_method}:FedProxMatch"}
    config = load_config("folders", keys)
    sites = Sites(config, api.deal(config.data, 0))
    job = job_of(sites, "a" * 32, data=False)
    assert job.config["method"] == "fedprox.py:FedProxMatch"  # not where it lies
    assert config.chosen().__class__ is find(config.method) and config.method not in METHODS

    server = sites.server()
    request = Packet({"model": config.chosen().start(server).tensors["model"]}, {"t": 1, "train": True})
    where = (Path(keys["data.path"]) / "clients" / "north", tmp_path / "memory")
    for named in (
        job,
        job.model_copy(update={"config": job.config | {"method": f"{own_method}:FedProxMatch"}}),
    ):
        with pytest.raises(flower_client.Refusal, match="join with --method"):
            flower_client.own(named, request, *where)
    other = tmp_path / "other.py"
    other.write_text(own_method.read_text("utf-8") + "#", "utf-8")
    with pytest.raises(flower_client.Refusal, match=r"other\.py is not the same file"):
        flower_client.own(job, request, *where, str(other))
    copy = tmp_path / "copy.py"
    copy.write_bytes(own_method.read_bytes())
    reply = flower_client.own(job, request, *where, str(copy))
    client = sites.client(0, sites.network())
    expected, _ = config.chosen().client_round(request, Packet(), client)
    assert reply.to_bytes() == expected.to_bytes()
