"""Pretrained weights from files, and EfficientNet-Lite0."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedseal.config.sections import ModelSettings
from fedseal.errors import UserError
from fedseal.frozen import make_backbone
from fedseal.models import Network, build_network
from fedseal.pretrained import load_weights, read_tensors


def lenet(seed: int = 0, weights: str = "", classes: int = 10) -> Network:
    settings = ModelSettings(weights=weights)
    return build_network(settings, channels=1, size=28, classes=classes, mean=[60.0], std=[90.0], seed=seed)


def test_all_tensors_of_a_model_that_fedseal_trained(finished: Path) -> None:
    file = finished / "model.safetensors"
    network = lenet(seed=5, weights=str(file))
    found = read_tensors(file)
    assert all(torch.equal(value, found[name]) for name, value in network.state_dict().items())
    assert network.loaded == f"loaded {len(found)} tensors from {file}"


@pytest.mark.parametrize("wrap", [lambda values: values, lambda values: {"epoch": 3, "state_dict": values}])
def test_a_file_of_torch_save_with_another_last_layer(tmp_path: Path, wrap: object) -> None:
    other = lenet(seed=1, classes=4).body.state_dict() | {"extra": torch.ones(2)}
    file = tmp_path / "weights.pth"
    torch.save(wrap(other), file)  # type: ignore[operator]
    network, fresh = lenet(weights=str(file)), lenet()
    assert torch.equal(network.body.conv1.weight, other["conv1.weight"])
    assert torch.equal(network.body.fc3.weight, fresh.body.fc3.weight)
    assert network.loaded == (
        f"loaded 8 tensors from {file}; not in the file, so initialised: body.fc3.weight, body.fc3.bias;"
        " not used: body.fc3.weight, body.fc3.bias, body.extra"
    )


def test_files_that_are_refused(tmp_path: Path) -> None:
    def refuse(path: Path, text: str) -> None:
        with pytest.raises(UserError, match=text):
            load_weights(lenet(), path)

    for name in ("missing.pth", "missing.safetensors"):
        refuse(tmp_path / name, rf"Cannot read model.weights = .*{name} \(No such file or directory\)")
        (tmp_path / f"folder-{name}").mkdir()
        refuse(tmp_path / f"folder-{name}", r"Cannot read .* \(Is a directory\): check the path")
        os.mkfifo(tmp_path / f"fifo-{name}")  # opening it would wait for ever
        refuse(tmp_path / f"fifo-{name}", r"Cannot read .* \(not a regular file\): check the path")
    torch.save({"conv1.bias": torch.ones(6).to_sparse()}, tmp_path / "sparse.pth")
    refuse(tmp_path / "sparse.pth", "has the sparse or quantised tensor 'conv1.bias': save it as a plain one")
    (tmp_path / "text.pth").write_text("no weights")
    refuse(tmp_path / "text.pth", "no weights that can be read safely")
    (tmp_path / "text.safetensors").write_text("no weights")
    refuse(tmp_path / "text.safetensors", "no weights that can be read safely")
    torch.save(lenet(), tmp_path / "whole.pth")  # a pickled module, which could run any code
    refuse(tmp_path / "whole.pth", "no weights that can be read safely")
    for new_format in (True, False):
        torch.save(lenet().state_dict(), tmp_path / "cut.pth", _use_new_zipfile_serialization=new_format)
        data = (tmp_path / "cut.pth").read_bytes()
        for length in (1, 3, 50, 150, 300, 450, len(data) // 2, len(data) - 1):
            (tmp_path / "cut.pth").write_bytes(data[:length])
            refuse(tmp_path / "cut.pth", "no weights that can be read safely")
    torch.save([1, 2], tmp_path / "list.pth")
    refuse(tmp_path / "list.pth", "no weights that can be read safely")
    save_file({"a": torch.ones(3)}, tmp_path / "other.safetensors")
    refuse(tmp_path / "other.safetensors", r"none of its 1 tensors \(a\)")
    save_file({"conv1.bias": torch.full((6,), torch.nan)}, tmp_path / "nan.safetensors")
    refuse(tmp_path / "nan.safetensors", "NaN")


def test_efficientnet_has_imagenet_weights_and_a_new_last_layer() -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    settings = ModelSettings(name="efficientnet-lite0", resize=64)

    def build(seed: int) -> Network:
        return build_network(
            settings, channels=3, size=32, classes=7, mean=[0.0] * 3, std=[1.0] * 3, seed=seed
        )

    one, other = build(0), build(1)
    assert one.mean.flatten().tolist() == [127.0] * 3 and one.std.flatten().tolist() == [128.0] * 3
    assert torch.equal(one.body._conv_stem.weight, other.body._conv_stem.weight)
    assert not torch.equal(one.body._fc.weight, other.body._fc.weight)
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    assert one.eval()(images).shape == (2, 7)
    assert make_backbone(one) == 1280 and isinstance(one.body._fc, nn.Identity)
    assert one(images).shape == (2, 1280)
    with pytest.raises(UserError, match="needs colour images"):
        build_network(settings, channels=1, size=32, classes=7, mean=[0.0], std=[1.0], seed=0)
