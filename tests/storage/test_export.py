"""Exported models give the same results as fedseal, without it; nothing is half-written."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conftest import SHAPES, TINY, Command, draw
from fedseal import export, load
from fedseal.config.sections import DataSettings
from fedseal.data.cache import root
from fedseal.data.decode import decode_image
from fedseal.data.sources import load_pool
from fedseal.storage.export import FORMATS
from fedseal.training.train import train

Logits = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def exports(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The finished run in every format. Tests must not modify it."""
    folder = tmp_path_factory.mktemp("exports")
    return {name: export(finished, name, folder / name, licence="CC BY 4.0 | mine") for name in FORMATS}


@pytest.fixture(scope="module")
def colour_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with a ResNet-9 with batch normalisation on colour images, and the folder of its images."""
    folder, rng = tmp_path_factory.mktemp("colour"), np.random.default_rng(0)
    for shape in SHAPES:
        for i in range(6):
            draw(folder / "images" / "server" / shape / f"{i}.png", shape, rng)
    draw(folder / "images" / "clients" / "one" / "0.png", SHAPES[0], rng)
    options = {
        "rounds": 2,
        "method": "server-sl",
        "evaluate": "model",
        "bootstrap.epochs": 0,
        "data.path": folder / "images",
        "data.size": 32,
        "model.name": "resnet9",
        "model.norm": "batch",
        "model.width": 4,
        "server.epochs": 3,
        "engine.workers": 1,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSEAL_DATA", str(folder / "cache"))
        train("folders", out=folder / "run", options=options)
    return folder / "run", folder / "images" / "server"


def reader(format: str, folder: Path) -> Logits:
    """An exported model as a function of pixels, by nothing but the libraries that its card names."""
    if format == "onnx":
        session = onnxruntime.InferenceSession(folder / "model.onnx")
        return lambda pixels: session.run(None, {"images": pixels})[0]
    if format == "torchscript":
        script = torch.jit.load(folder / "model.pt")
        return lambda pixels: script(torch.from_numpy(pixels)).numpy()
    names: dict[str, Any] = {}
    exec((folder / "network.py").read_text(), names)
    weights = load_file(folder / "model.safetensors")
    return lambda pixels: names["network"](weights, torch.from_numpy(pixels)).numpy()


def fashion(number: int) -> np.ndarray:
    """Images of Fashion-MNIST, [n, 1, 28, 28]."""
    return np.array(load_pool(DataSettings(), progress=False).pixels[-number:])


@torch.inference_mode()
def check_logits(run: Path, logits: Logits, images: np.ndarray) -> None:
    """Compares an exported model with PyTorch on batches of one and of five images."""
    for batch in (images[:1], images[1:6]):
        expected = load(run).model(torch.from_numpy(batch)).numpy()
        assert expected.shape == (len(batch), expected.shape[1]) and len(np.unique(expected)) > len(batch)
        np.testing.assert_allclose(logits(batch), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("format", FORMATS)
def test_lenet_on_fashion_mnist(exports: dict[str, Path], finished: Path, format: str) -> None:
    check_logits(finished, reader(format, exports[format]), fashion(6))


@pytest.mark.parametrize("format", FORMATS)
def test_batch_normalised_resnet_on_colour_images(
    colour_run: tuple[Path, Path], tmp_path: Path, format: str
) -> None:
    run, images = colour_run
    folder = export(run, format, tmp_path / "model")
    pixels = np.stack([decode_image(file, 32, 3) for file in sorted(images.rglob("*.png"))[::3]])
    check_logits(run, reader(format, folder), pixels)
    card = (folder / "README.md").read_text("utf-8")
    assert "| data | own images (folders) |" in card and str(images.parent) not in card
    assert "| images | this model | mean of the last 2 rounds |" in card


@pytest.mark.parametrize("format", FORMATS)
def test_lines_of_the_card_run_without_fedseal(
    exports: dict[str, Path], finished: Path, tmp_path: Path, format: str
) -> None:
    folder = Path(shutil.copytree(exports[format], tmp_path / "model"))
    large = Image.fromarray(fashion(1)[0, 0]).resize((60, 40))  # the lines crop and resize it
    large.save(folder / "image.png")
    [lines] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text("utf-8"), re.DOTALL)
    assert lines.partition("\n\n")[2].count("\n") == 6
    blocked = "import sys\nsys.modules['fedseal'] = None\n"  # any import of it fails
    done = subprocess.run(
        [sys.executable, "-c", blocked + lines], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    label, _, confidence = done.stdout.strip().rpartition(" ")
    expected = load(finished).predict(folder / "image.png")
    assert label == expected.labels[0]
    assert float(confidence) == pytest.approx(expected.confidences[0], abs=1e-4)


def test_card_states_the_facts_of_the_run(exports: dict[str, Path], finished: Path) -> None:
    card = (exports["onnx"] / "README.md").read_text("utf-8")
    summary = json.loads((finished / "summary.json").read_text())
    for line in (
        "| network | lenet, 61,706 parameters |",
        "| data | Fashion-MNIST (licence: MIT) |",
        "| labels | 50 for training, 20 for validation |",
        "| method | fedseal |",
        "| rounds | 2 |",
        "| seed | 0 |",
        "| licence | CC BY 4.0 \\| mine |",
    ):
        assert f"\n{line}\n" in card
    test = summary["test_accuracy"]
    assert f"| test images of the run | {test['last']:.2%} | {test['mean_last_10']:.2%} |" in card


def test_description_has_classes_input_and_calibration(exports: dict[str, Path], finished: Path) -> None:
    about, model = json.loads((exports["torchscript"] / "model.json").read_text()), load(finished)
    assert (about["format"], about["file"]) == ("torchscript", "model.pt")
    assert about["classes"] == list(model.classes)
    assert (about["input"]["type"], about["input"]["shape"]) == ("uint8", ["n", 1, 28, 28])
    assert model.calibration is not None and about["calibration"]["images"] == 20
    assert about["calibration"]["temperature"] == model.calibration.temperature
    assert about["calibration"]["bias"] == model.calibration.bias.tolist()
    assert about["calibration"]["mix"] == model.calibration.mix.tolist()


def test_the_archive_has_no_dates(exports: dict[str, Path]) -> None:
    """So a repeated export gives the same bytes."""
    with zipfile.ZipFile(exports["torchscript"] / "model.pt") as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_exports_hold_no_paths_of_this_machine(exports: dict[str, Path]) -> None:
    """PyTorch writes stack traces into ONNX and TorchScript files."""
    contents = [file.read_bytes() for folder in exports.values() for file in folder.iterdir()]
    with zipfile.ZipFile(exports["torchscript"] / "model.pt") as archive:
        contents += [archive.read(name) for name in archive.namelist()]
    for parent in (Path(torch.__file__).parents[1], Path(export.__code__.co_filename).parents[2]):
        assert not any(str(parent).encode() in content for content in contents)


def test_onnx_is_one_file(exports: dict[str, Path]) -> None:
    assert sorted(path.name for path in exports["onnx"].iterdir()) == [
        "README.md",
        "model.json",
        "model.onnx",
        "predict.py",
    ]


def test_the_script_refuses_more_than_eight_bits(exports: dict[str, Path], tmp_path: Path) -> None:
    Image.fromarray(np.full((28, 28), 40_000, np.uint16)).save(tmp_path / "deep.png")
    words = [sys.executable, "predict.py", tmp_path / "deep.png"]
    done = subprocess.run(words, cwd=exports["onnx"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("This image has more than 8 bits per pixel")


# ------------------------------------------------------------------ bad input


def test_command(fedseal: Command, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "model"
    answer = fedseal("export", finished, "--format", "onnx", "--out", out, "--licence", "MIT")
    assert (answer.code, answer.out, answer.err) == (0, f"model card: {out / 'README.md'}\n", "")
    assert "| licence | MIT |" in (out / "README.md").read_text("utf-8")
    again = fedseal("export", finished, "--format", "safetensors", "--out", out)
    again.refuses(f"{out} exists already: remove it, or choose another folder.")
    assert sorted(path.name for path in out.parent.rglob("*")) == [
        "README.md", "model", "model.json", "model.onnx", "predict.py",
    ]  # fmt: skip


def test_licence_is_not_stated_by_default(finished: Path, tmp_path: Path) -> None:
    card = (export(finished, "torchscript", tmp_path / "model") / "README.md").read_text("utf-8")
    assert "| licence | not stated |" in card


def test_bad_format_folder_and_run(fedseal: Command, finished: Path, copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    fedseal("export", finished, "--format", "pickle", "--out", out).refuses(
        "The format must be one of onnx, torchscript, safetensors, not 'pickle'."
    )
    fedseal("export", tmp_path / "gone", "--format", "onnx", "--out", out).refuses("gone is not a run folder")
    (tmp_path / "file").touch()
    fedseal("export", finished, "--format", "safetensors", "--out", tmp_path / "file" / "model").refuses(
        f"Cannot write {tmp_path / 'file' / 'model'} (", "): choose another folder."
    )
    summary = copy / "summary.json"
    whole = json.loads(summary.read_text())
    summary.write_text(json.dumps(whole | {"labels": 3}))
    fedseal("export", copy, "--format", "safetensors", "--out", out).refuses(
        f"{summary} is missing or damaged"
    )
    (copy / "model.safetensors").unlink()
    fedseal("export", copy, "--format", "safetensors", "--out", out).refuses("There is no model")
    assert not out.exists() and {path.name for path in tmp_path.iterdir()} == {"file", "run"}


def test_own_network_frozen_and_enlarged(
    own_network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()  # for the features of the frozen network
    (tmp_path / "cache" / "fashion-mnist").symlink_to(root() / "fashion-mnist")
    monkeypatch.setenv("FEDSEAL_DATA", str(tmp_path / "cache"))
    build: dict[str, Any] = {}
    exec(own_network.read_text("utf-8"), build)
    save_file(build["build"](1, 28, 10).state_dict(), tmp_path / "weights.safetensors")
    keys = {
        **TINY,
        "model.name": f"{own_network}:build",
        "model.weights": tmp_path / "weights.safetensors",
        "model.freeze": True,
        "model.resize": 40,
    }
    run = train("fmnist-lenet", out=tmp_path / "run", options=keys).folder
    for format in FORMATS:
        folder = export(run, format, tmp_path / format)
        check_logits(run, reader(format, folder), fashion(6))
        assert "| network | my_net.py:build, " in (folder / "README.md").read_text("utf-8")


BRANCHING = """
from torch import nn

class Branching(nn.Linear):
    def forward(self, x):
        y = super().forward(x.flatten(1))
        return y if x.sum() > 0 else -y

def build(channels, size, classes):
    return Branching(channels * size * size, classes)
"""


@pytest.mark.parametrize("format", FORMATS)
def test_network_that_cannot_be_exported(fedseal: Command, tmp_path: Path, format: str) -> None:
    """Tracing follows one branch only, so TorchScript would silently give wrong results."""
    (tmp_path / "net.py").write_text(BRANCHING)
    keys = {**TINY, "rounds": 1, "method": "server-sl", "model.name": f"{tmp_path / 'net.py'}:build"}
    run = train("fmnist-lenet", out=tmp_path / "run", options=keys).folder
    answer = fedseal("export", run, "--format", format, "--out", tmp_path / "model")
    answer.refuses(f"The network in {run} cannot be exported as {format} (", "): choose another format.")
    assert not (tmp_path / "model").exists()


def test_missing_extra(
    fedseal: Command, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)  # as if it were not installed
    answer = fedseal("export", finished, "--format", "onnx", "--out", tmp_path / "model")
    answer.refuses("onnxscript is not installed: install fedseal with its extra 'onnx'.")
    assert not (tmp_path / "model").exists()


def test_configuration_is_read_before_the_model(fedseal: Command, copy: Path, tmp_path: Path) -> None:
    """A method of your own selects the arithmetic, which is too late once the model has computed."""
    (copy / "config.toml").write_text("rounds = ")
    (copy / "model.safetensors").unlink()
    answer = fedseal("export", copy, "--format", "torchscript", "--out", tmp_path / "new")
    answer.refuses("config.toml is not valid TOML")


def test_nan_weights(fedseal: Command, copy: Path, tmp_path: Path) -> None:
    path = copy / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = {"fedseal": file.metadata()["fedseal"]}  # without the checksum
    values = load_file(path)
    values["body.conv1.weight"][0] = float("nan")
    save_file(values, path, metadata)
    fedseal("export", copy, "--format", "onnx", "--out", tmp_path / "model").refuses(
        str(copy), "NaN or infinite weights"
    )
    assert not (tmp_path / "model").exists()
