"""A client's memory: its rows follow the client's images, and a file stores it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedseal.config.sections import AugmentSettings, ModelSettings, TrainingSettings
from fedseal.core import Images, Packet, Participant
from fedseal.data.augment import Augmenter
from fedseal.engines import memory
from fedseal.engines.memory import MemoryFile
from fedseal.models import build_network
from fedseal.system.checksums import add_checksum


def pictures(*values: int) -> Tensor:
    """One image of a single colour per value."""
    return torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 8, 8).contiguous()


def client(*values: int) -> Participant:
    """A client with these images."""
    network = build_network(
        ModelSettings(), channels=3, size=32, classes=2, mean=[0.0] * 3, std=[1.0] * 3, seed=0
    )
    augment = Augmenter(AugmentSettings(), False)
    images = Images(pictures(*values))
    return Participant("north", network, images, TrainingSettings(), augment, 0, torch.device("cpu"), 2)


def remembered(*values: float) -> Packet:
    """p̄ of two classes and counts after round 7, as in FedSEAL."""
    mean = torch.tensor([[v, 1 - v] for v in values])
    return Packet({"images": {"mean": mean, "count": torch.arange(1, len(values) + 1)}}, {"t": 7})


def request(t: int) -> Packet:
    return Packet(scalars={"t": t})


def test_memory_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    file = MemoryFile(tmp_path / "new" / "run")
    assert file.read() == b"" and memory.read(b"") == Packet()
    file.write(memory.write(remembered(0.1, 0.2, 0.3), pictures(1, 2, 3)))
    stored = MemoryFile(tmp_path / "new" / "run").read()
    assert memory.read(stored).to_bytes() == remembered(0.1, 0.2, 0.3).to_bytes()
    packet, same = memory.align(stored, request(8), client(1, 2, 3))
    assert packet.to_bytes() == remembered(0.1, 0.2, 0.3).to_bytes() and len(same.data) == 3


def test_rows_follow_images_by_content() -> None:
    stored = memory.write(remembered(0.1, 0.2, 0.3), pictures(1, 2, 3))
    packet, same = memory.align(stored, request(8), client(3, 9, 1))  # reordered, one removed, one new
    images = packet.tensors["images"]
    assert images["mean"][:, 0].tolist() == pytest.approx([0.3, 0, 0.1])
    assert images["count"].tolist() == [3, 0, 1] and packet.scalars == {"t": 7}
    assert torch.equal(same.data.pixels, pictures(3, 9, 1))


def test_repeated_round_uses_only_images_that_it_used_before() -> None:
    stored = memory.write(remembered(0.1, 0.2, 0.3), pictures(1, 2, 3))
    packet, fewer = memory.align(stored, request(7), client(3, 9, 1))
    assert torch.equal(fewer.data.pixels, pictures(3, 1))
    assert packet.tensors["images"]["count"].tolist() == [3, 1]


def test_equal_images_keep_separate_rows() -> None:
    before, now = memory.hash_images(pictures(5, 5, 6)), memory.hash_images(pictures(5, 6, 5, 5))
    assert memory.match_rows(before, now).tolist() == [0, 2, 1, -1]


def damaged() -> dict[str, bytes]:
    """Unusable memories. One has fewer hashes than rows, one another last byte."""
    rows = memory.write(remembered(0.1, 0.2), pictures(1))
    changed = add_checksum(memory.write(remembered(0.1), pictures(1)))[:-1] + b"?"
    return {
        "empty": b"",
        "garbage": b"garbage",
        "long garbage": b"\xff" * 100,
        "rows are missing": rows,
        "changed": changed,
    }


@pytest.mark.parametrize("name", damaged())
def test_damaged_memory_is_reported_and_starts_afresh(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_bytes(damaged()[name])
    stored = MemoryFile(tmp_path / "run").read()
    assert stored == b"" and "run is damaged" in caplog.text
    packet, same = memory.align(stored, request(8), client(1))
    assert packet == Packet() and len(same.data) == 1


def test_memory_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """Starting afresh would overwrite it."""
    (tmp_path / "run").mkdir()
    with pytest.raises(IsADirectoryError):
        MemoryFile(tmp_path / "run").read()


def test_memory_without_rows_is_read_back_unchanged() -> None:
    plain = Packet({"bias": {"b": torch.ones(2)}}, {"t": 3})
    for images in ((1, 2), (1, 2, 9)):
        packet, same = memory.align(memory.write(plain, pictures(1, 2)), request(3), client(*images))
        assert packet.to_bytes() == plain.to_bytes() and len(same.data) == len(images)


def test_memory_without_hashes_is_read_back_unchanged(tmp_path: Path) -> None:
    """In a simulation the images never change, so the memory has no hashes."""
    (tmp_path / "0").write_bytes(memory.write(remembered(0.1, 0.2)))
    packet, same = memory.align(MemoryFile(tmp_path / "0").read(), request(8), client(1, 2))
    assert packet.to_bytes() == remembered(0.1, 0.2).to_bytes() and len(same.data) == 2
