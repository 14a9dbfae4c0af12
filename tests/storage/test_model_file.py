"""Model files: a damaged one, and one with NaN, is refused by name; one without a checksum is read."""

import json
import random
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from conftest import Command
from fedseal.errors import UserError
from fedseal.storage.model_file import load
from fedseal.system.checksums import verify_checksum

IMAGE = torch.arange(28 * 28, dtype=torch.int32).remainder(256).to(torch.uint8).view(1, 1, 28, 28)


def header(model: Path) -> dict[str, str]:
    return verify_checksum(model.read_bytes())


def test_changed_bytes_are_refused_or_harmless(copy: Path) -> None:
    path, draw = copy / "model.safetensors", random.Random(0)
    whole, expected, refused = path.read_bytes(), load(copy)(IMAGE), 0
    places = {*range(0, 3000, 30), *draw.sample(range(len(whole)), 100)}
    for place in places:
        data = bytearray(whole)
        data[place] ^= draw.randrange(1, 256)
        path.write_bytes(data)
        try:
            found = load(copy)(IMAGE)
        except UserError as error:
            assert str(error).startswith(f"{path} is damaged, or not a fedseal model (")
            refused += 1
            continue
        assert torch.equal(found, expected)
    assert refused > 0.9 * len(places)


def test_a_model_without_a_checksum_is_read(copy: Path) -> None:
    path, expected = copy / "model.safetensors", load(copy)(IMAGE)
    path.write_bytes(save(load_file(path), header(path)))
    assert b"sha256" not in path.read_bytes() and torch.equal(load(copy)(IMAGE), expected)


def test_a_header_with_a_larger_network_is_refused_before_it_takes_memory(copy: Path) -> None:
    """LeNet for images of 4096×4096 would have 8 GB of weights."""
    path, before = copy / "model.safetensors", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    about = json.loads(header(path)["fedseal"]) | {"size": 4096}
    path.write_bytes(save(load_file(path), {"fedseal": json.dumps(about)}))
    with pytest.raises(UserError, match="is damaged, or not a fedseal model"):
        load(copy)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 200_000  # kB


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_nan_and_infinite_weights_are_refused_by_every_command(
    fedseal: Command, copy: Path, value: float
) -> None:
    path = copy / "model.safetensors"
    weights = load_file(path)
    weights["body.fc3.bias"][3] = value
    path.write_bytes(save(weights, header(path)))
    for command in ("evaluate", "report"):
        fedseal(command, copy).refuses(f"{path} has NaN or infinite weights: train it again with a lower")
    fedseal("predict", copy, "any.png").refuses(f"{path} has NaN or infinite weights")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("classes", 3),
        ("classes", []),
        ("classes", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ("channels", "one"),
        ("channels", 2),
        ("size", 10**9),
        ("size", -28),
        ("size", True),
        ("mean", [float("nan")]),
        ("mean", []),
        ("std", "0.5"),
        ("model", {"name": "lenet", "width": 10**12}),
        ("model", {"name": "none"}),
        ("model", []),
        ("calibration", []),
        ("calibration", {"temperature": 0, "bias": [0] * 10, "mix": [0.1] * 10, "images": 5}),
        ("calibration", {"temperature": 1, "bias": [0] * 9, "mix": [0.1] * 9, "images": 5}),
    ],
)
def test_headers_with_wrong_values_are_refused(copy: Path, key: str, value: object) -> None:
    path = copy / "model.safetensors"
    about = json.loads(header(path)["fedseal"]) | {key: value}
    path.write_bytes(save(load_file(path), {"fedseal": json.dumps(about)}))
    with pytest.raises(UserError, match=r"is damaged, or not a fedseal model|model\.name"):
        load(copy)
