"""The dictionary of data sources, and the way from a `[data]` section to a federation."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pydantic import ValidationError

from fedseal.config.sections import DataSettings
from fedseal.data.catalogue import PUBLISHED
from fedseal.data.federation import load_federation
from fedseal.data.pool import Pool
from fedseal.data.published import PublishedDataset
from fedseal.data.sources import SOURCES, get_published, load_pool
from fedseal.data.splits import split
from fedseal.errors import UserError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSEAL_DATA", str(tmp_path / "cache"))


def paint(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (40, 20), 100).save(path)
    return path


def test_the_sources() -> None:
    assert list(SOURCES) == ["fashion-mnist", "cifar10", "svhn", "parquet", "folders"]
    assert list(PUBLISHED) == ["fashion-mnist", "cifar10", "svhn"]


@pytest.mark.parametrize("progress", [False, True])
def test_published_data_set(progress: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(PublishedDataset, "get", lambda self, **options: asked.append((self.name, options)))
    load_pool(DataSettings(source="svhn"), progress=progress)
    load_pool(DataSettings(source="svhn", size=32, channels=3), progress=progress)  # its own shape
    assert asked == [("svhn", {"progress": progress})] * 2


def test_folders_default_to_32_pixels_in_colour(tmp_path: Path) -> None:
    for name in ("server/a/1", "server/b/1", "clients/c/1"):
        paint(tmp_path / "data" / f"{name}.png")
    folders = {"source": "folders", "path": str(tmp_path / "data")}
    assert load_pool(DataSettings(**folders), progress=False).pixels.shape == (3, 3, 32, 32)
    small = load_pool(DataSettings(**folders, size=8, channels=1), progress=False)
    assert small.pixels.shape == (3, 1, 8, 8)


def test_parquet_defaults_to_the_shape_of_its_images(tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    Image.new("L", (9, 9), 100).save(image)
    table = pa.table({"image": [{"bytes": image.read_bytes()}], "label": [0]})
    for part in ("train", "test"):
        pq.write_table(table, tmp_path / f"{part}.parquet")
    files = {"source": "parquet", "path": str(tmp_path)}
    assert load_pool(DataSettings(**files), progress=False).pixels.shape == (2, 1, 9, 9)
    large = load_pool(DataSettings(**files, size=16, channels=3), progress=False)
    assert large.pixels.shape == (2, 3, 16, 16)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "mnist"}, "There is no data source 'mnist': choose one of fashion-mnist, .*folders"),
        (
            {"source": "svhn", "path": "x"},
            r"data\.path does not apply to svhn.*fedseal data get svhn --from x",
        ),
        ({"source": "svhn", "size": 28}, r"of svhn are 32×32×3: leave out data\.size"),
        ({"source": "fashion-mnist", "channels": 3}, r"28×28×1: .* data\.channels"),
    ],
)
def test_refused_sections(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_pool(DataSettings.model_validate(values), progress=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "folders"}, "needs path"),
        ({"source": "parquet"}, "needs path"),
        ({"source": "folders", "path": "x", "channels": 2}, "channels"),
        ({"source": "folders", "path": "x", "size": -1}, "size"),
    ],
)
def test_refused_settings(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataSettings.model_validate(values)


def test_unknown_published_data_set() -> None:
    with pytest.raises(UserError, match="There is no data set 'folders': choose one of fashion-mnist, "):
        get_published("folders")


def test_one_entry_in_the_dictionary_adds_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The federation is the split of the new source's pool."""
    labels = np.arange(60) % 2
    parts = {"train": range(50), "test": range(50, 60)}
    pool = Pool("mine", np.zeros((60, 1, 4, 4), np.uint8), labels, ("a", "b"), parts, flips=False)
    asked = []

    def load_mine(data: DataSettings, progress: bool) -> Pool:
        asked.append((data, progress))
        return pool

    monkeypatch.setitem(SOURCES, "mine", load_mine)
    data = DataSettings(source="mine", labels=4, validation=4, clients=2, images_per_client=5)
    federation = load_federation(data, 3)
    assert federation.pool is pool
    assert federation.fingerprint == split(pool, data, 3).fingerprint
    load_federation(data, 3, progress=True)
    assert asked == [(data, False), (data, True)]
