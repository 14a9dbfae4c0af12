"""Predictions of a trained model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedseal import Classifier, UserError, load
from fedseal.config.sections import DataSettings
from fedseal.data.sources import load_pool
from fedseal.storage import classifier as classifiers


@pytest.fixture(scope="module")
def model(finished: Path) -> Classifier:
    return load(finished)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """Real images, [n, H, W, 1]."""
    return load_pool(DataSettings(), progress=False).pixels[-40:].transpose(0, 2, 3, 1)


def test_labels_and_confidences_are_those_of_the_model(model: Classifier, images: np.ndarray) -> None:
    found = model.predict(images)
    confidences, best = model(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).max(dim=1)
    assert found.labels == [model.classes[m] for m in best] and len(set(found.labels)) > 1
    assert found.confidences == pytest.approx(confidences.tolist(), abs=1e-6)
    assert found.files == 40 * [None]
    shares = [found.labels.count(name) / 40 for name in model.classes]
    assert found.plain_mix == found.mix == pytest.approx(shares)


def test_one_path_or_image(model: Classifier, images: np.ndarray, tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    image = Image.fromarray(images[0, ..., 0])
    image.save(file)
    expected = model.predict(images[:1])
    for given in (file, str(file), [file], tmp_path, image, [image], images[0], images[0, ..., 0]):
        found = model.predict(given)
        assert (found.labels, found.confidences) == (expected.labels, expected.confidences)
    assert model.predict(file).files == model.predict(tmp_path).files == [file]


@pytest.mark.parametrize("adapt", [False, True])
def test_minimum_confidence(model: Classifier, images: np.ndarray, adapt: bool) -> None:
    found = model.predict(images, adapt=adapt)
    limit = sorted(found.confidences)[20]
    sure = model.predict(images, adapt=adapt, min_confidence=limit)
    kept = [confidence >= limit for confidence in found.confidences]
    assert kept.count(True) == 20
    assert sure.labels == [name if keep else "" for name, keep in zip(found.labels, kept, strict=True)]
    assert (sure.confidences, sure.mix, sure.plain_mix) == (found.confidences, found.mix, found.plain_mix)


@pytest.mark.parametrize("limit", [-0.1, 1.5, float("nan")])
def test_minimum_confidence_is_a_probability(model: Classifier, images: np.ndarray, limit: float) -> None:
    with pytest.raises(UserError, match="minimum confidence must be between 0 and 1, not"):
        model.predict(images, min_confidence=limit)


@pytest.mark.parametrize("adapt", [False, True])
def test_batches_do_not_matter(
    model: Classifier, images: np.ndarray, monkeypatch: pytest.MonkeyPatch, adapt: bool
) -> None:
    whole = model.predict(images, adapt=adapt)
    monkeypatch.setattr(classifiers, "BATCH_BYTES", 7 * 28 * 28)
    parts = model.predict(images, adapt=adapt)
    assert parts.labels == whole.labels and parts.mix == pytest.approx(whole.mix)
    assert parts.confidences == pytest.approx(whole.confidences, abs=1e-5)


def test_no_images(model: Classifier, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        model.predict([tmp_path])
    assert str(caught.value) == f"There are no readable images in {tmp_path}: check the path."
    with pytest.raises(UserError, match=r"in .*/a, .*/b, .*/c, …: check the path"):
        model.predict([tmp_path / name for name in "abcd"], skip=True)
    with pytest.raises(UserError, match="There are no readable images in what was given"):
        model.predict([])
