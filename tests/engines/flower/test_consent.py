"""What a client accepts from a server, and what it sends."""

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import Command

pytest.importorskip("flwr")

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedseal.config.load import load_config
from fedseal.core import Packet
from fedseal.data.federation import load_federation
from fedseal.engines.flower.client_app import NO_FILES, TaskRefusedError, app, run_deployed
from fedseal.engines.flower.consent import Consent, Limits, parse_consent
from fedseal.engines.flower.task import ClientTask, make_task, pack, unpack
from fedseal.errors import UserError
from fedseal.run_setup import RunSetup


def make_setup(own: dict[str, Any], **changes: Any) -> RunSetup:
    keys = own | {"data.path": str(own["data.path"])} | {k.replace("__", "."): v for k, v in changes.items()}
    config = load_config("folders", keys)
    return RunSetup(config, load_federation(config.data, 0))


def run(task: ClientTask, own: dict[str, Any], tmp_path: Path, consent: Consent, request: Packet) -> Packet:
    images = Path(own["data.path"]) / "clients" / "north"
    return run_deployed(task, request, images, tmp_path / "memory", NO_FILES, consent)


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("client__epochs", 101, "at most 100 for client.epochs, but the server asks for 101"),
        ("client__batch", 2000, "--limit batch=2000"),
        ("client__threads", 65, "--limit threads=65"),
        ("data__size", 513, "--limit size=513"),
        ("model__resize", 600, "--limit size=600"),
        ("augment__n", 11, "--limit operations=11"),
    ],
)
def test_a_client_refuses_what_is_above_its_limits(
    key: str, value: int, limit: str, own: dict[str, Any], tmp_path: Path
) -> None:
    task = make_task(make_setup(own, **{key: value}), "a" * 32)
    with pytest.raises(TaskRefusedError, match=limit):
        run(task, own, tmp_path, Consent(), Packet())
    assert not (tmp_path / "memory").exists()


def test_a_client_refuses_a_shift_that_does_not_fit_and_other_methods(
    own: dict[str, Any], tmp_path: Path
) -> None:
    task = make_task(make_setup(own, augment__shift=10**9), "a" * 32)
    with pytest.raises(TaskRefusedError, match=r"augment\.shift to 1000000000 for images of 16 pixels"):
        run(task, own, tmp_path, Consent(), Packet())
    task = make_task(make_setup(own), "a" * 32)
    with pytest.raises(TaskRefusedError, match="only the method fedshift, but the server uses fedseal"):
        run(task, own, tmp_path, Consent(methods=("fedshift",)), Packet())


def test_a_client_can_insist_on_secure_aggregation(own: dict[str, Any], tmp_path: Path) -> None:
    task, consent = make_task(make_setup(own), "a" * 32), Consent(masked=True)
    with pytest.raises(TaskRefusedError, match="only with secure aggregation"):
        run(task, own, tmp_path, consent, Packet(scalars={"t": 1, "train": True}))
    reply = run(task, own, tmp_path, consent, Packet(scalars={"secure": "keys"}))
    assert set(reply.tensors["secure"]) == {"cipher", "mask"}


def test_counts_need_both_a_server_that_asks_and_a_client_that_agrees(
    own: dict[str, Any], tmp_path: Path
) -> None:
    setup = make_setup(own, client__epochs=101)
    method, server = setup.config.selected_method(), setup.server()
    state = method.initial_state(server)
    request = Packet(
        {"model": state.tensors["model"], "thresholds": {"tau": server.data.labels.new_zeros(3).float()}},
        {"t": 1, "lambda": 0.5, "train": True},
    )
    task, limits = make_task(setup, "a" * 32), Limits(epochs=101)
    for asks, agrees in ((True, False), (False, True), (True, True)):
        asked = task.model_copy(update={"counts": asks})
        reply = run(asked, own, tmp_path, Consent(limits=limits, share_counts=agrees), request)
        if asks and agrees:
            assert reply.counts == {"positive": 18, "negative": 0}
        else:
            assert reply.scalars == {"t": 1, "counts": False}


def test_a_server_cannot_make_a_client_malicious(own: dict[str, Any], tmp_path: Path) -> None:
    """A task with `[simulate]` and a folder of memories gets the same reply as one without."""
    setup = make_setup(own, fedseal__threshold="fixed", fedseal__tau=0.0)
    sent = setup.config.selected_method().initial_state(setup.server()).tensors["model"]
    tensors = {"model": sent, "thresholds": {"tau": torch.zeros(3)}}
    request = Packet(tensors, {"t": 1, "lambda": 1.0, "train": True}).to_bytes()
    task, images = make_task(setup, "a" * 32), Path(own["data.path"]) / "clients" / "north"
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    attack = {"simulate": {"malicious": 1, "attack": "zeros"}}
    more = {"config": task.config | attack, "memory_folder": str(tmp_path / "other")}
    hostile = task.model_copy(update=more)
    settings: dict[str, Any] = {"client": "north", "images": str(images), "device": "cpu", "threads": 1}
    replies: list[bytes] = []
    for asked in (task, hostile):
        memory = {"memory": str(tmp_path / f"memory-{len(replies)}")}
        message = Message(pack(request, asked), 7, MessageType.TRAIN)
        reply = app(message, Context(1, 7, settings | memory, RecordDict(), {}))
        replies.append(unpack(reply.content))
    assert replies[0] == replies[1] and not (tmp_path / "other").exists()
    learned = Packet.from_bytes(replies[1]).tensors["model"]["body.fc3.weight"]
    assert learned.any() and not torch.equal(learned, sent["body.fc3.weight"])


def test_options_of_join(fedseal: Command, tmp_path: Path) -> None:
    assert parse_consent({"epochs": 7}, ["fedseal"], True) == Consent(
        limits=Limits(epochs=7), methods=("fedseal",), share_counts=True
    )
    join = ("join", "127.0.0.1:1", "--images", tmp_path, "--insecure", "--name", "north")
    fedseal(*join, "--limit", "epoch=5").refuses("--limit: unknown key 'epoch' (did you mean 'epochs'?)")
    fedseal(*join, "--limit", "epochs=many").refuses("--limit: 'epochs' is 'many', but")
    text = fedseal("join", "--help").out
    for name, field in Limits.model_fields.items():
        assert f"{name}={field.default}" in text.replace("\n", "")


def test_only_a_known_method_can_be_insisted_on() -> None:
    assert parse_consent({}, ["fedshift"], False).methods == ("fedshift",)
    assert parse_consent({}, ["Mine"], False, own_method=True).methods == ("Mine",)
    with pytest.raises(UserError, match=r"--only: there is no method 'fedsift' \(did you mean 'fedshift'"):
        parse_consent({}, ["fedsift"], False)
