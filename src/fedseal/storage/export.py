"""Exports a run's model for use without fedseal, with a model card: docs/export.md."""

import io
import json
import logging
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import torch
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from fedseal.config.load import load_config
from fedseal.errors import UserError
from fedseal.storage.model_card import describe, write_card, write_script
from fedseal.storage.model_file import load
from fedseal.storage.run_folder import read_summary, require_run
from fedseal.system.files import write_new_folder
from fedseal.system.lazy import import_object

Files = dict[str, bytes]


def export(
    run: str | os.PathLike[str],
    format: str,
    out: str | os.PathLike[str],
    *,
    licence: str = "not stated",
    network: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes the model of a finished run into a new folder, as "onnx", "torchscript" or "safetensors".

    The folder holds the model, `model.json` with classes, input and calibration, and the model card
    `README.md`, which shows how to use the model without fedseal, and the same as a script, `predict.py`.
    `licence` is a line of the card. `network` is the file of your own network, if it is no longer where
    the run's configuration says.
    """
    source, folder = Path(run), Path(out)
    if format not in FORMATS:
        raise UserError(f"The format must be one of {', '.join(FORMATS)}, not '{format}'.")
    if folder.exists():
        raise UserError(f"{folder} exists already: remove it, or choose another folder.")
    require_run(source)
    config = load_config(source / "config.toml")  # it selects the arithmetic, before the model computes
    classifier, summary = load(source, network), read_summary(source)
    model = classifier.model.requires_grad_(False)
    example = torch.zeros(2, classifier.channels, classifier.size, classifier.size, dtype=torch.uint8)
    try:
        with torch.no_grad(), _quiet():
            files = FORMATS[format](model, example)
    except UserError:
        raise
    except Exception as error:  # PyTorch's exporters raise many different exceptions
        raise UserError(
            f"The network in {source} cannot be exported as {format} ({type(error).__name__}): choose another"
            " format."
        ) from error
    about = describe(classifier, format, next(iter(files)))
    try:
        card = write_card(classifier, config, summary, format, licence)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{source / 'summary.json'} is damaged: finish the run with --resume.") from error
    files |= {"model.json": f"{json.dumps(about, indent=2)}\n".encode(), "README.md": card.encode()}
    files["predict.py"] = write_script(classifier, format).encode()
    write_new_folder(folder, files)
    return folder


def _export_onnx(model: nn.Module, example: Tensor) -> Files:
    import_object("onnx:ModelProto")  # both are in the extra, and PyTorch needs them
    import_object("onnxscript:ir")
    program = torch.onnx.export(
        torch.export.export(model, (example,), dynamic_shapes=ANY_BATCH),
        dynamo=True,
        input_names=["images"],
        output_names=["logits"],
        verbose=False,
    )
    assert program is not None
    proto = program.model_proto
    for node in proto.graph.node:
        del node.metadata_props[:]  # stack traces with the paths of this machine
    return {"model.onnx": proto.SerializeToString()}


def _export_torchscript(model: nn.Module, example: Tensor) -> Files:
    traced = torch.jit.trace(model, example)
    rng = torch.Generator().manual_seed(0)
    other = torch.randint(0, 256, (3, *example.shape[1:]), generator=rng, dtype=torch.uint8)
    torch.testing.assert_close(traced(other), model(other))  # tracing can miss what depends on the input
    buffer, stripped = io.BytesIO(), io.BytesIO()
    torch.jit.save(traced, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(stripped, "w") as new:
        for name in old.namelist():
            if not name.endswith(".debug_pkl"):  # stack traces with the paths of this machine
                new.writestr(zipfile.ZipInfo(name), old.read(name))  # with no date, so always the same
    return {"model.pt": stripped.getvalue()}


def _export_safetensors(model: nn.Module, example: Tensor) -> Files:
    """The weights, and the network as a Python function of them."""
    program = torch.export.export(model, (example,), dynamic_shapes=ANY_BATCH)
    names = [spec.target for spec in program.graph_signature.input_specs if spec.target is not None]
    values = {**program.state_dict, **program.constants}
    tensors = {name: values[name].clone(memory_format=torch.contiguous_format) for name in names}
    code = NETWORK.format(
        names=names, forward=program.graph_module.code.strip(), shape=str(list(example.shape[1:]))[1:-1]
    )
    return {"model.safetensors": bytes(save_safetensors(tensors)), "network.py": code.encode()}


FORMATS: dict[str, Callable[[nn.Module, Tensor], Files]] = {
    "onnx": _export_onnx,
    "torchscript": _export_torchscript,
    "safetensors": _export_safetensors,
}
ANY_BATCH = ({0: torch.export.Dim("n")},)

NETWORK = '''"""The network as a function of its weights and of uint8 images, written by torch.export."""

import torch
from torch import device, inf, nan

WEIGHTS = {names}


def network(weights, images):
    """Logits of uint8 images [n, {shape}]."""
    return forward(None, *(weights[name] for name in WEIGHTS), images)[0]


{forward}
'''


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the messages of PyTorch's exporters, which concern their own code."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
