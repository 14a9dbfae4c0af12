"""Accuracies of a model: after a round, and of a finished run."""

import os
from pathlib import Path

import numpy as np
import torch

from fedseal import weights
from fedseal.config.load import load_config
from fedseal.core import LabelledImages, Packet, Server
from fedseal.data.federation import load_federation
from fedseal.data.folders import read_labelled
from fedseal.errors import UserError
from fedseal.learn import INFERENCE_BATCH, accuracy, predict
from fedseal.run_setup import RunSetup, images_are_elsewhere
from fedseal.storage.accuracies import PREFIXES, accuracy_name
from fedseal.storage.model_file import load
from fedseal.storage.run_folder import read_summary, require_run
from fedseal.system.environment import set_up_process
from fedseal.system.machine import threads


class Evaluator:
    """Measures models on all test sets and on the validation images."""

    def __init__(self, setup: RunSetup, server: Server) -> None:
        tests = setup.federation.tests
        rows = np.unique(np.concatenate([np.zeros(0, np.int64), *tests.values()]))
        self.server = server
        self.images: LabelledImages = setup.labelled_images(rows)  # an image in two test sets counts once
        self.tests = {
            name: torch.from_numpy(np.searchsorted(rows, test)) for name, test in tests.items() if len(test)
        }

    def __call__(self, state: Packet) -> dict[str, float]:
        """Accuracies of the global model and of the clients' average."""
        result: dict[str, float] = {}
        for group in PREFIXES:
            if group in state.tensors:
                result |= self.measure(state.tensors[group], group)
        return result

    def measure(self, values: weights.Tensors, model: str = "model") -> dict[str, float]:
        """Accuracies of one model, named as those of `model`."""
        probs, labels = predict(self.server, values, self.images), self.images.labels
        result = {
            accuracy_name(model, name): accuracy(probs[rows], labels[rows])
            for name, rows in self.tests.items()
        }
        validation = self.server.validation
        checked = accuracy(predict(self.server, values, validation), validation.labels)
        return result | {accuracy_name(model, "validation"): checked}


def evaluate(run: str | os.PathLike[str], test: str | os.PathLike[str] | None = None) -> dict[str, float]:
    """Accuracies of a finished run's model, on the run's own split or on a labelled folder."""
    folder = Path(run)
    if test is not None:
        return {"test_accuracy": _evaluate_folder(folder, Path(test))}
    require_run(folder)
    config = load_config(folder / "config.toml")
    set_up_process(config.engine.arithmetic)
    model = load(folder).model
    if images_are_elsewhere(config):
        raise UserError(
            f"The clients' images of the run in {folder} are not on this machine: give --test DIR."
        )
    setup = RunSetup(config, load_federation(config.data, config.seed))
    summary = read_summary(folder)
    if setup.federation.fingerprint != summary["split"]:
        raise UserError(
            f"The data have changed since the run in {folder}: restore the same images, or give --test DIR."
        )
    with threads(config.server.threads):
        return Evaluator(setup, setup.server()).measure(weights.get_weights(model), summary["evaluate"])


def _evaluate_folder(run: Path, test: Path) -> float:
    classifier = load(run)
    images = read_labelled(
        test, classifier.classes, size=classifier.size, channels=classifier.channels, progress=False
    )
    chunks = torch.from_numpy(images.pixels).split(INFERENCE_BATCH)
    probs = torch.cat([classifier(chunk) for chunk in chunks])
    return accuracy(probs, torch.from_numpy(images.labels))
