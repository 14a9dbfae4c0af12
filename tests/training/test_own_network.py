"""Your own network (the example of docs/new-model.md) and frozen networks, from training to prediction."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import TINY, Command, same_weights
from fedseal.config.load import load_config
from fedseal.data.cache import root
from fedseal.data.federation import load_federation
from fedseal.errors import UserError
from fedseal.rounds import Event
from fedseal.run_setup import RunSetup
from fedseal.storage.events_file import read_rounds
from fedseal.storage.model_file import load
from fedseal.training.evaluate import evaluate
from fedseal.training.train import train


def settings(network: Path, **more: Any) -> dict[str, Any]:
    return {**TINY, "server.threads": 1, "model.name": f"{network}:build", **more}


def test_same_weights_with_workers_on_flower_and_after_a_resume(own_network: Path, tmp_path: Path) -> None:
    """Also with dropout, which draws random numbers itself."""
    text = own_network.read_text("utf-8")
    own_network.write_text(text.replace("nn.Flatten(),", "nn.Flatten(), nn.Dropout(0.5),"), "utf-8")
    assert "Dropout" in own_network.read_text("utf-8")
    train("fmnist-lenet", out=tmp_path / "one", options=settings(own_network))
    train("fmnist-lenet", out=tmp_path / "two", options=settings(own_network, rounds=1))
    train(
        "fmnist-lenet",
        out=tmp_path / "two",
        resume=True,
        options=settings(own_network, **{"engine.workers": 2}),
    )
    flower = {"engine.name": "flower", "engine.workers": 2}
    train("fmnist-lenet", out=tmp_path / "flower", options=settings(own_network, **flower))
    assert same_weights(tmp_path / "one", tmp_path / "two")
    assert same_weights(tmp_path / "one", tmp_path / "flower")
    assert "body.0.weight" in load_file(tmp_path / "one" / "model.safetensors")


def test_batch_norm_that_needs_two_images(
    shapes: Path, own: dict[str, Any], tmp_path: Path, fedseal: Command
) -> None:
    """A last batch of one image, and a client with one image, do not end a run."""
    network = tmp_path / "normalised.py"
    network.write_text("""
from torch import nn

def build(channels, size, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size * size, 8), nn.BatchNorm1d(8),
                         nn.Linear(8, classes))
""")
    for image in sorted((shapes / "clients" / "south").iterdir())[1:]:
        image.unlink()
    keys = own | {"method": "fedavg-fixmatch", "model.name": f"{network}:build", "model.norm": "none"}
    words = ("train", "folders", "--out", tmp_path / "run")
    answer = fedseal(*words, options=keys | {"client.batch": 17, "rounds": 1})
    assert answer.code == 0
    assert f"client 'south' has one image, but BatchNorm in {network}:build needs two" in answer.err
    answer = fedseal("train", "folders", "--out", tmp_path / "other", options=keys | {"client.batch": 1})
    answer.refuses("client.batch is 1, but BatchNorm in", "needs two images: raise it")


def test_fingerprint_depends_on_the_content_of_the_file(own_network: Path, tmp_path: Path) -> None:
    before = load_config("fmnist-lenet", settings(own_network)).fingerprint()
    moved = own_network.rename(tmp_path / "moved.py")
    assert load_config("fmnist-lenet", settings(moved)).fingerprint() == before
    moved.write_text(moved.read_text("utf-8") + "# changed\n", "utf-8")
    assert load_config("fmnist-lenet", settings(moved)).fingerprint() != before


def test_a_model_file_cannot_name_its_code(own_network: Path, tmp_path: Path, fedseal: Command) -> None:
    run = train("fmnist-lenet", out=tmp_path / "run", options=settings(own_network)).folder
    images = torch.randint(256, (3, 1, 28, 28), dtype=torch.uint8)
    expected = load(run)(images)
    moved = (run / "model.safetensors").rename(tmp_path / "alone.safetensors")
    with pytest.raises(UserError, match=r"give its file my_net\.py with --network"):
        load(moved)
    assert torch.equal(load(moved, own_network)(images), expected)
    other = tmp_path / "other.py"
    other.write_text(own_network.read_text("utf-8") + "#", "utf-8")
    with pytest.raises(UserError, match=r"other\.py differs from the my_net\.py that trained"):
        load(moved, other)
    assert str(tmp_path) not in moved.read_bytes()[:2000].decode("latin-1")


LINEAR = "return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))"
TUPLE = """
from torch import nn
class Tuple(nn.Linear):
    def __init__(self):
        super().__init__(784, 10)
    def forward(self, x):
        logits = super().forward(x.flatten(1))
        return (logits, logits) if self.training else logits
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 3", "it returns int, not an nn.Module"),
        ("return nn.Flatten()", "its output has the shape (2, 784), not (2, 10)"),
        ("raise OSError('no disk')", "no disk"),
        ("return nn.Linear(5, 5)", "builds no usable network"),
        ("raise SystemExit(3)", "builds no usable network"),
        (f"{LINEAR}.requires_grad_(False)", "does not require grad"),
        (f"m = {LINEAR[7:]}; m.forward = lambda x: x[:, 0, 0, :10].long(); return m", "floating-point"),
        (f"m = {LINEAR[7:]}; m[1].weight.data *= float('nan'); return m", "finite floating-point"),
        ("return Tuple()", "its output is a tuple, not a tensor"),
    ],
)
def test_a_network_that_cannot_be_used(tmp_path: Path, fedseal: Command, body: str, reason: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(f"{TUPLE}\ndef build(channels, size, classes):\n    {body}\n")
    answer = fedseal("train", "fmnist-lenet", "--out", tmp_path / "run", options=settings(file))
    answer.refuses("build in", "bad.py", reason)
    assert not (tmp_path / "run" / "events.jsonl").exists()


@pytest.mark.parametrize("pixels", ["m.pixel_std = 60.0", "m.pixel_std = [0.0]", "m.pixel_mean = [1.0, 2.0]"])
def test_a_normalisation_that_does_not_fit(tmp_path: Path, fedseal: Command, pixels: str) -> None:
    file = tmp_path / "bad.py"
    body = f"m = {LINEAR[7:]}; {pixels}; return m"
    file.write_text(f"from torch import nn\ndef build(channels, size, classes):\n    {body}\n")
    answer = fedseal("train", "fmnist-lenet", "--out", tmp_path / "run", options=settings(file))
    answer.refuses("The network's pixel_", "but must have 1 ")


def test_trying_a_network_changes_nothing(tmp_path: Path) -> None:
    """BatchNorm would count the batches that it sees in training."""
    file = tmp_path / "norm.py"
    body = "return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(784, 10))"
    file.write_text(f"from torch import nn\ndef build(channels, size, classes):\n    {body}\n")
    config = load_config("fmnist-lenet", settings(file))
    network = RunSetup(config, load_federation(config.data, 0)).network()
    assert int(network.state_dict()["body.0.num_batches_tracked"]) == 0
    assert all(value.grad is None for value in network.parameters())


def test_a_file_may_be_edited_while_the_run_goes_on(own_network: Path, tmp_path: Path) -> None:
    """The run uses the code that it began with, also in worker processes, and says so in its model."""
    file, text = tmp_path / "net.py", own_network.read_text("utf-8")
    file.write_text(text, "utf-8")

    class Edit:
        def __call__(self, event: Event) -> None:
            file.write_text("raise RuntimeError('half written')", "utf-8")

        def close(self) -> None: ...

    keys = settings(file, **{"engine.workers": 2})
    train("fmnist-lenet", out=tmp_path / "edited", options=keys, observers=[Edit()])
    with pytest.raises(UserError, match=r"net\.py differs from the net\.py that trained"):
        load(tmp_path / "edited")
    file.write_text(text, "utf-8")
    train("fmnist-lenet", out=tmp_path / "other", options=keys)
    assert same_weights(tmp_path / "edited", tmp_path / "other")
    load(tmp_path / "edited")


def test_a_file_without_the_function(own_network: Path, tmp_path: Path, fedseal: Command) -> None:
    keys = settings(own_network) | {"model.name": f"{own_network}:make"}
    answer = fedseal("train", "fmnist-lenet", "--out", tmp_path / "run", options=keys)
    answer.refuses("defines no function make that builds a network")


FROZEN = {"model.freeze": True, "model.views": 1, "server.threads": 1}


def test_a_frozen_network_is_the_same_on_all_engines(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "fashion-mnist").symlink_to(root() / "fashion-mnist")
    monkeypatch.setenv("FEDSEAL_DATA", str(tmp_path / "cache"))
    keys = {**TINY, **FROZEN, "model.weights": str(finished / "model.safetensors")}
    one = train("fmnist-lenet", out=tmp_path / "one", options=keys).folder
    train("fmnist-lenet", out=tmp_path / "two", options=keys | {"rounds": 1})
    train("fmnist-lenet", out=tmp_path / "two", resume=True, options=keys | {"engine.workers": 2})
    train("fmnist-lenet", out=tmp_path / "flower", options=keys | {"engine.name": "flower"})
    assert same_weights(one, tmp_path / "two") and same_weights(one, tmp_path / "flower")

    # Only the last layer was trained and sent.
    trained, start = (load_file(folder / "model.safetensors") for folder in (one, finished))
    kept = {name.removeprefix("backbone."): value for name, value in trained.items() if "backbone." in name}
    assert kept and all(torch.equal(value, start[name]) for name, value in kept.items())
    assert trained["head.body.weight"].shape == (10, 84)
    clients, sent = 3, 4 * (10 * 84 + 10 + 2 * 84)
    assert all(sent < event["bytes_up"] / clients < 2 * sent for event in read_rounds(one))

    # The model takes images, and has the accuracy that training measured.
    assert load(one)(torch.zeros(2, 1, 28, 28, dtype=torch.uint8)).shape == (2, 10)
    last = read_rounds(one)[-1]
    assert evaluate(one) == {name: last[name] for name in evaluate(one)}


def test_random_weights_are_not_frozen(tmp_path: Path, fedseal: Command) -> None:
    answer = fedseal("train", "fmnist-lenet", "--out", tmp_path / "run", options={**TINY, **FROZEN})
    answer.refuses("model.freeze keeps the first weights of lenet, but these are random")


def test_training_says_what_it_loaded(finished: Path, tmp_path: Path, fedseal: Command) -> None:
    file = finished / "model.safetensors"
    keys = {**TINY, "rounds": 1, "model.weights": str(file)}
    answer = fedseal("train", "fmnist-lenet", "--out", tmp_path / "run", options=keys)
    assert answer.code == 0 and f"loaded 12 tensors from {file}" in answer.out
