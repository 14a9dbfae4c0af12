"""A deployed client protects its update as the server's configuration says."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedseal.config.load import load_config
from fedseal.core import Packet
from fedseal.data.federation import load_federation
from fedseal.engines.flower.client_app import run_deployed
from fedseal.engines.flower.task import make_task
from fedseal.privacy import update_of
from fedseal.run_setup import RunSetup


def test_upload_is_clipped_noisy_and_alone(own: dict[str, Any], tmp_path: Path) -> None:
    """With σ = 0.5, all N weights together have noise of length 0.5·C·√N."""
    keys = {**own, "data.path": str(own["data.path"]), "fedseal.threshold": "fixed", "fedseal.tau": 0.0}
    lengths: dict[float, float] = {}
    for noise in (0.0, 0.5):
        private = {"privacy.mode": "local", "privacy.noise": noise, "privacy.clip": 0.001}
        config = load_config("folders", keys | private)
        setup, method = RunSetup(config, load_federation(config.data, 0)), config.selected_method()
        server = setup.server()
        [step, *_] = method.prepare(method.initial_state(server), server)
        tensors = {
            "model": step.state.tensors["model"],
            "thresholds": {"tau": method.thresholds({}, server, None)},
        }
        request = Packet(tensors, {"t": 1, "train": True, "lambda": 1.0})
        task, images = make_task(setup, "a" * 32), Path(keys["data.path"]) / "clients" / "north"
        reply = run_deployed(task, request, images, tmp_path / f"memory-{noise}")
        again = run_deployed(task, request, images, tmp_path / f"memory-{noise}")
        assert again.to_bytes() == reply.to_bytes()  # another noise on the same update would reveal more
        assert reply.scalars == {"t": 1} and list(reply.tensors) == ["model"]
        update = update_of(reply.tensors["model"], tensors["model"])
        lengths[noise] = sum(float(value.square().sum()) for value in update.values()) ** 0.5
        number = sum(value.numel() for value in update.values())
    later = Packet(request.tensors, {**request.scalars, "t": 2})
    assert run_deployed(task, later, images, tmp_path / "memory-0.5").to_bytes() != reply.to_bytes()
    assert lengths[0.0] == pytest.approx(0.001, rel=1e-3)
    assert lengths[0.5] == pytest.approx(0.0005 * number**0.5, rel=0.05)


def test_settings_travel_only_if_they_are_used(own: dict[str, Any]) -> None:
    config = load_config("folders", own | {"data.path": str(own["data.path"])})
    assert "privacy" not in make_task(RunSetup(config, load_federation(config.data, 0)), "a" * 32).config
