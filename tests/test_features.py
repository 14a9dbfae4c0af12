"""Frozen networks: features by image, kept on disk, independent of other images to the bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedseal import features
from fedseal.config.sections import AugmentSettings, ModelSettings
from fedseal.data.augment import Augmenter
from fedseal.data.cache import evict
from fedseal.errors import UserError
from fedseal.features import Extractor, FeatureViews, extract
from fedseal.frozen import make_backbone
from fedseal.models import build_network

PIXELS = np.random.default_rng(0).integers(0, 256, (70, 3, 16, 16), np.uint8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSEAL_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make(seed: int = 0, shift: int = 4) -> Extractor:
    backbone = build_network(
        ModelSettings(), channels=3, size=16, classes=4, mean=[120.0] * 3, std=[60.0] * 3, seed=seed
    )
    assert make_backbone(backbone) == 84
    return Extractor(backbone, Augmenter(AugmentSettings(shift=shift), flip=True), torch.device("cpu"))


def rows(*numbers: int) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.int64)


def test_features_are_the_inputs_of_the_last_layer() -> None:
    extractor = make()
    found = extract(extractor, 0, PIXELS, rows(3, 60))[rows(3, 60)]
    with torch.no_grad():
        expected = extractor.backbone(torch.from_numpy(PIXELS[[3, 60]]))
    assert found.shape == (2, 1, 84) and found.dtype == torch.float16
    assert torch.allclose(found[:, 0].float(), expected, atol=2e-3)


def test_features_do_not_depend_on_the_other_images(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = extract(make(), 2, PIXELS, np.arange(70))[rows(69, 5)]
    monkeypatch.setenv("FEDSEAL_DATA", str(cache.with_name("other")))
    alone = extract(make(), 2, PIXELS[[5]], rows(0))[rows(0)]
    assert torch.equal(everything[1], alone[0])
    assert everything.shape == (2, 5, 84)
    assert len({row.numpy().tobytes() for row in alone[0]}) == 5  # five different views


def test_only_new_images_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    real = Extractor.features

    def count(self: Extractor, view: str, pixels: torch.Tensor, hashes: list[bytes]) -> Any:
        computed.append(len(pixels))
        return real(self, view, pixels, hashes)

    monkeypatch.setattr(Extractor, "features", count)
    before = extract(make(), 0, PIXELS, np.arange(69))
    assert sorted(computed) == [5, 32, 32]  # threads may overtake each other
    after = extract(make(), 0, PIXELS, np.arange(70))
    assert computed[3:] == [1]
    assert torch.equal(before[np.arange(69)], after[np.arange(69)])
    extract(make(), 1, PIXELS, rows(1))  # the image itself is there, its copies are not
    assert computed[4:] == [1, 1]
    extract(make(seed=1), 0, PIXELS, rows(1))
    extract(make(shift=2), 1, PIXELS, rows(1))
    assert computed[6:] == [1, 1, 1]  # another network; other copies


def test_an_interruption_keeps_finished_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "SEGMENT", 32)
    real, calls = Extractor.features, []

    def fail(self: Extractor, view: str, pixels: torch.Tensor, hashes: list[bytes]) -> Any:
        calls.append(len(pixels))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, view, pixels, hashes)

    monkeypatch.setattr(Extractor, "features", fail)
    with pytest.raises(KeyboardInterrupt):
        extract(make(), 0, PIXELS, np.arange(70))
    extract(make(), 0, PIXELS, np.arange(70))
    assert calls == [32, 32, 32, 6]


def test_features_belong_to_the_code_of_your_own_network() -> None:
    places = {replace(make(), code=code).folder("plain", (3, 16, 16), "weights") for code in ("", "a", "b")}
    assert len(places) == 3


def test_features_are_evicted_when_nobody_uses_them(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = extract(make(), 1, PIXELS, rows(0))
    monkeypatch.setenv("FEDSEAL_CACHE_GB", "0")
    evict()
    assert len(list(cache.glob("features-*"))) == 3 and found[rows(0)].shape == (1, 3, 84)
    del found
    extract(make(shift=2), 0, PIXELS, rows(0))  # which evicts others
    assert len(list(cache.glob("features-*"))) == 1
    evict()
    assert not list(cache.glob("features-*"))


def test_views_are_picked_at_random_by_kind() -> None:
    values = torch.arange(7.0).view(1, 7, 1).expand(2000, 7, 1)  # the number of the view
    picker, rng = FeatureViews(3), torch.Generator().manual_seed(0)
    weak, strong = picker.weak(values, rng), picker.strong(values, rng)
    assert weak.shape == strong.shape == values.shape and torch.equal(weak[:, 1:], values[:, 1:])
    assert weak[:, 0].unique().tolist() == [0, 1, 2, 3] and strong[:, 0].unique().tolist() == [4, 5, 6]
    assert torch.equal(picker.weak(values, torch.Generator().manual_seed(0)), weak)
    none = FeatureViews(0)
    assert torch.equal(none.weak(values[:, :1], rng), values[:, :1])
    assert torch.equal(none.strong(values[:, :1], rng), values[:, :1])


def test_networks_that_cannot_be_frozen() -> None:
    backbone = make().backbone
    with pytest.raises(UserError, match="features are not finite"):
        backbone.std.zero_()
        extract(Extractor(backbone, make().augmenter, torch.device("cpu")), 0, PIXELS, rows(0))
    with pytest.raises(UserError, match="takes the shape"):
        backbone.body = torch.nn.Identity()
        extract(Extractor(backbone, make().augmenter, torch.device("cpu")), 0, PIXELS, rows(1))
    with pytest.raises(UserError, match="the network has none"):
        make_backbone(backbone)
