"""A deployed client loads its own copy of a method's file, and no file that the server names."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedseal.config.load import load_config
from fedseal.core import Packet
from fedseal.data.federation import load_federation
from fedseal.engines.flower.client_app import TaskRefusedError, run_deployed
from fedseal.engines.flower.task import make_task
from fedseal.methods import METHODS
from fedseal.methods.loader import find_method
from fedseal.run_setup import RunSetup


def test_a_client_loads_only_its_own_copy(own_method: Path, own: dict[str, Any], tmp_path: Path) -> None:
    keys = own | {"data.path": str(own["data.path"]), "method": f"{own_method}:FedProxMatch"}
    config = load_config("folders", keys)
    setup, method = RunSetup(config, load_federation(config.data, 0)), config.selected_method()
    task = make_task(setup, "a" * 32)
    assert task.config["method"] == "fedprox.py:FedProxMatch"  # without the server's path
    assert type(method) is find_method(config.method) and config.method not in METHODS

    w = method.initial_state(setup.server()).tensors["model"]
    request = Packet({"model": w}, {"t": 1, "train": True})
    folders = (Path(keys["data.path"]) / "clients" / "north", tmp_path / "memory")
    with_path = task.model_copy(update={"config": task.config | {"method": config.method}})
    for named in (task, with_path):
        with pytest.raises(TaskRefusedError, match="join with --method"):
            run_deployed(named, request, *folders)
    other = tmp_path / "other.py"
    other.write_text(own_method.read_text("utf-8") + "#", "utf-8")
    with pytest.raises(TaskRefusedError, match=r"other\.py differs from the server's file"):
        run_deployed(task, request, *folders, str(other))
    copy = tmp_path / "copy.py"
    copy.write_bytes(own_method.read_bytes())
    reply = run_deployed(task, request, *folders, str(copy))
    expected, _ = method.client_round(request, Packet(), setup.client(0, setup.network()))
    assert reply.to_bytes() == expected.to_bytes()
