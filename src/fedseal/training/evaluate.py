"""Accuracies of a model: after a round, and of a finished run."""

import os
from pathlib import Path

import numpy as np
import torch

from fedseal import weights
from fedseal.config.load import load_config
from fedseal.core import LabelledImages, Packet, Server, derive_seed
from fedseal.data.catalogue import PUBLISHED
from fedseal.data.federation import load_federation
from fedseal.data.folders import read_labelled
from fedseal.data.pool import Ints
from fedseal.errors import UserError
from fedseal.label_shift import calibrate, estimate_mix, posterior
from fedseal.learn import INFERENCE_BATCH, accuracy, predict_logits
from fedseal.run_setup import RunSetup, images_are_elsewhere
from fedseal.storage.accuracies import PREFIXES, accuracy_name
from fedseal.storage.model_file import load, trained_weights
from fedseal.storage.run_folder import read_summary, require_run
from fedseal.system.environment import set_up_process
from fedseal.system.machine import threads

MIX_IMAGES = 500  # of a client, for its class mix: more change little


class Evaluator:
    """Measures models on all test sets and on the validation images.

    `client_accuracy` is that of predictions with each client's own class mix (docs/label-shift.md). A client
    would estimate the mix and predict by itself; here a simulation does so for all of them.
    """

    def __init__(self, setup: RunSetup, server: Server, mix_images: int = MIX_IMAGES) -> None:
        tests = setup.federation.tests
        rows = np.unique(np.concatenate([np.zeros(0, np.int64), *tests.values()]))
        self.server = server
        self.images: LabelledImages = setup.labelled_images(rows)  # an image in two test sets counts once
        self.tests = {
            name: torch.from_numpy(np.searchsorted(rows, test)) for name, test in tests.items() if len(test)
        }
        mixed = setup.federation.client_tests
        self.client_tests = [torch.from_numpy(np.searchsorted(rows, test)) for test in mixed]
        self.client_images = [setup.images(mix_rows(setup, k, mix_images)) for k in range(len(mixed))]

    def __call__(self, state: Packet) -> dict[str, float]:
        """Accuracies of the global model and of the clients' average."""
        result: dict[str, float] = {}
        for group in PREFIXES:
            if group in state.tensors:
                result |= self.measure(state.tensors[group], group)
        return result

    def measure(self, values: weights.Tensors, model: str = "model") -> dict[str, float]:
        """Accuracies of one model, named as those of `model`."""
        logits, labels = predict_logits(self.server, values, self.images), self.images.labels
        probs = logits.softmax(dim=1)
        result = {
            accuracy_name(model, name): accuracy(probs[rows], labels[rows])
            for name, rows in self.tests.items()
        }
        validation = self.server.validation
        checked = predict_logits(self.server, values, validation)
        if self.client_tests:
            calibration = calibrate(checked, validation.labels)
            adapted = []
            for rows, images in zip(self.client_tests, self.client_images, strict=True):
                seen = calibration.probs(predict_logits(self.server, values, images))
                mix = estimate_mix(seen, calibration)
                adapted.append(posterior(calibration.probs(logits[rows]), calibration.mix, mix))
            truth = labels[torch.cat(self.client_tests)]
            result[accuracy_name(model, "client")] = accuracy(torch.cat(adapted), truth)
        result[accuracy_name(model, "validation")] = accuracy(checked.softmax(dim=1), validation.labels)
        return result


def mix_rows(setup: RunSetup, k: int, number: int) -> Ints:
    """The images by which client k's class mix is estimated, at most `number`.

    The published data sets are in random order. Others may be sorted by class.
    """
    rows, config = setup.federation.clients[k], setup.config
    if config.data.source in PUBLISHED or len(rows) <= number:
        return rows[:number]
    rng = np.random.default_rng(derive_seed(config.seed, "mix", setup.federation.names[k]))
    return np.sort(rng.choice(rows, number, replace=False))


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
    setup = RunSetup(config, load_federation(config.data, config.seed)).with_features()
    summary = read_summary(folder)
    if setup.federation.fingerprint != summary["split"]:
        raise UserError(
            f"The data have changed since the run in {folder}: restore the same images, or give --test DIR."
        )
    with threads(config.server.threads):
        return Evaluator(setup, setup.server()).measure(trained_weights(model), summary["evaluate"])


def _evaluate_folder(run: Path, test: Path) -> float:
    classifier = load(run)
    images = read_labelled(
        test, classifier.classes, size=classifier.size, channels=classifier.channels, progress=False
    )
    chunks = torch.from_numpy(images.pixels).split(INFERENCE_BATCH)
    probs = torch.cat([classifier(chunk) for chunk in chunks])
    return accuracy(probs, torch.from_numpy(images.labels))
