"""A client's memory on its disk."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedseal.core import Packet
from fedseal.memory import Memory, fingerprint, matches


def pictures(*values: int) -> Tensor:
    """Images of one colour each."""
    return torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 4, 4).contiguous()


def remembered(*values: float) -> Packet:
    """p̄ of two classes and counts, as FedSEAL has them."""
    mean = torch.tensor([[v, 1 - v] for v in values])
    return Packet({"images": {"mean": mean, "count": torch.arange(1, len(values) + 1)}}, {"t": 7})


def test_what_was_written_comes_back_to_the_bit(tmp_path: Path) -> None:
    memory, images = Memory(tmp_path / "new" / "run"), pictures(1, 2, 3)
    assert memory.read(images)[0] == Packet()
    memory.write(remembered(0.1, 0.2, 0.3), images)
    packet, known = Memory(tmp_path / "new" / "run").read(images)
    assert packet.to_bytes() == remembered(0.1, 0.2, 0.3).to_bytes() and known.all()


def test_images_are_known_by_content(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "run")
    memory.write(remembered(0.1, 0.2, 0.3), pictures(1, 2, 3))
    packet, known = memory.read(pictures(3, 9, 1))  # reordered, one removed, one new
    assert known.tolist() == [True, False, True]
    images = packet.tensors["images"]
    assert images["mean"][:, 0].tolist() == pytest.approx([0.3, 0, 0.1])
    assert images["count"].tolist() == [3, 0, 1] and packet.scalars == {"t": 7}


def test_equal_images_have_rows_of_their_own() -> None:
    then, now = fingerprint(pictures(5, 5, 6)), fingerprint(pictures(5, 6, 5, 5))
    assert matches(then, now).tolist() == [0, 2, 1, -1]


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 100])
def test_a_damaged_memory_is_named_and_begun_afresh(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_bytes(content)
    packet, known = Memory(tmp_path / "run").read(pictures(1))
    assert packet == Packet() and not known.any()
    assert "run is damaged" in caplog.text


def test_a_memory_that_cannot_be_read_just_now_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(IsADirectoryError):
        Memory(tmp_path / "run").read(pictures(1))


def test_a_memory_without_rows_comes_back_as_it_was(tmp_path: Path) -> None:
    memory, plain = Memory(tmp_path / "run"), Packet({"bias": {"b": torch.ones(2)}}, {"t": 3})
    memory.write(plain, pictures(1, 2))
    packet, known = memory.read(pictures(1, 2))
    assert packet.to_bytes() == plain.to_bytes() and known.all()


def test_a_memory_of_the_local_engine_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(remembered(0.1, 0.2).to_bytes())
    packet, known = Memory(tmp_path / "0").read(pictures(1, 2))
    assert packet.to_bytes() == remembered(0.1, 0.2).to_bytes() and known.all()
