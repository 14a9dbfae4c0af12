"""Features on disk: found by the image's pixels, whatever the order; damage is noticed."""

import logging
from pathlib import Path

import numpy as np
import pytest

from fedseal.data.feature_store import add_segment, find_images, hash_images, read_index

PIXELS = np.arange(5 * 12, dtype=np.uint8).reshape(5, 3, 2, 2)
ROWS = np.array([0, 1, 3, 4])
FEATURES = np.arange(4 * 6, dtype=np.float16).reshape(4, 6)


def fill(folder: Path) -> list[bytes]:
    hashes = hash_images(PIXELS, ROWS)
    add_segment(folder, hashes[:3], FEATURES[:3])
    add_segment(folder, hashes[3:], FEATURES[3:])
    return hashes


def test_features_are_found_by_pixels_in_any_order(tmp_path: Path) -> None:
    table = find_images(tmp_path, len(PIXELS), ROWS, fill(tmp_path))
    assert np.array_equal(table[np.array([4, 0, 3])], FEATURES[[3, 0, 2]])
    assert table.file[2] == -1
    turned = PIXELS[::-1]
    table = find_images(tmp_path, 5, np.array([0, 4]), hash_images(turned, np.array([0, 4])))
    assert np.array_equal(table[np.array([0, 4])], FEATURES[[3, 0]])


@pytest.mark.parametrize("suffix", [".npy", ".json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "missing"])
def test_a_damaged_segment_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str, damage: str
) -> None:
    hashes = fill(tmp_path)
    small = min(tmp_path.glob("*.npy"), key=lambda file: file.stat().st_size).with_suffix(suffix)
    content = bytearray(small.read_bytes())
    content[len(content) // 2] ^= 0x41
    small.write_bytes(content[:-3] if damage == "cut" else content)
    if damage == "missing":
        small.unlink()
    with caplog.at_level(logging.WARNING, "fedseal"):
        known = read_index(tmp_path)
    assert set(known) >= set(hashes[:3]) and hashes[3] not in known
    assert (damage == "missing" and suffix == ".json") or "computed again" in caplog.text
