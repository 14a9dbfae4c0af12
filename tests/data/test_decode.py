"""Images with more than 8 bits are scaled; those whose range is unknown are refused with a reason."""

import io
import os
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedseal.data import decode
from fedseal.data.decode import MAX_PIXELS, decode_image, decode_images, failure_reason
from fedseal.errors import UserError
from fedseal.system.environment import set_up_process

GREY = np.array([[0, 255, 4095], [4096, 32768, 65535]], np.uint16)


def tiff(pixels: bytes, bits: int, *, kind: int = 1, photometric: int = 1) -> bytes:
    """A grey TIFF of 3×2 pixels; `kind` is its sample format."""
    tags = {256: 3, 257: 2, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 2}
    tags |= {279: len(pixels), 339: kind}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    return (
        b"II*\0"
        + struct.pack("<I", 8 + len(pixels))
        + pixels
        + struct.pack("<H", len(tags))
        + entries
        + bytes(4)
    )


def saved(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize(
    "file",
    [
        saved(Image.fromarray(GREY), "PNG"),
        saved(Image.fromarray(GREY), "TIFF"),
        tiff(GREY.tobytes(), 16),
        tiff((65535 - GREY).tobytes(), 16, photometric=0),
        b"P5\n3 2\n65535\n" + GREY.astype(">u2").tobytes(),
    ],
    ids=["PNG", "TIFF", "plain TIFF", "TIFF, white is 0", "PGM"],
)
def test_16_bits_are_scaled_to_8(file: bytes) -> None:
    assert decode_image(file, None, None).tolist() == [[[0, 0, 15], [16, 128, 255]]]


def test_12_bits_are_scaled_to_8() -> None:
    rows = bytes.fromhex("000800fff0" + "010fff0000")  # 000 800 fff, 010 fff 000, each row padded to 5 bytes
    assert decode_image(tiff(rows, 12), None, None).tolist() == [[[0, 128, 255], [1, 255, 0]]]


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (saved(Image.fromarray(np.float32([[0.1, 0.9]])), "TIFF"), "signed or floating-point pixels"),
        (tiff(np.zeros(6, np.int16).tobytes(), 16, kind=2), "signed or floating-point pixels"),
        (tiff(np.zeros(6, np.int8).tobytes(), 8, kind=2), "signed or floating-point pixels"),
        (tiff(np.zeros(6, np.uint32).tobytes(), 32), "32-bit pixels"),
        (b"Pf\n1 1\n-1.0\n" + np.float32([0.5]).tobytes(), "32-bit pixels"),
    ],
    ids=["float", "signed 16 bits", "signed 8 bits", "32 bits", "float PPM"],
)
def test_unknown_ranges_are_refused(file: bytes, reason: str) -> None:
    with pytest.raises(UserError, match=f"{reason}: convert it to 8 or 16 bits"):
        decode_image(file, 12, 1)


def test_transparent_palettes_do_not_warn() -> None:
    image = Image.new("P", (8, 8))
    image.putpalette(bytes(range(9)))
    file = io.BytesIO()
    image.save(file, "PNG", transparency=bytes([0, 128, 255]))
    with warnings.catch_warnings(record=True) as caught:
        set_up_process()
        assert decode_image(file.getvalue(), 8, 3).shape == (3, 8, 8)
    assert not caught


def test_special_files_are_no_images(tmp_path: Path) -> None:
    """Opening a FIFO would block for ever, also for SIGTERM."""
    fifo, loop = tmp_path / "fifo.png", tmp_path / "loop.png"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    found = list(decode_images([fifo, Path("/dev/zero"), loop], 8, 3))
    reasons = [failure_reason(error) for error in found if isinstance(error, Exception)]
    assert reasons == ["not a regular file", "not a regular file", "Too many levels of symbolic links"]


def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """Eight threads at once; each bomb, a file of some hundred kilobytes, would take a gigabyte."""
    bomb, usual = tmp_path / "bomb.png", tmp_path / "usual.png"
    Image.new("L", (9000, 9000)).save(bomb)
    Image.new("L", (64, 64), 7).save(usual)
    assert bomb.stat().st_size < 500_000
    code = """
import re, sys
from pathlib import Path
from fedseal.data.decode import decode_images, failure_reason

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1000

bomb, usual = map(Path, sys.argv[1:])
list(decode_images([usual], 32, 3))
before = peak()
*refused, image = decode_images([bomb] * 8 + [usual], 32, 3, workers=8)
print({failure_reason(error) for error in refused}, image.shape, peak() - before < 50, sep="\\n")
"""
    answer = subprocess.run(
        [sys.executable, "-c", code, bomb, usual], capture_output=True, text=True, check=True
    )
    assert answer.stdout.splitlines() == ["{'more than 67 million pixels'}", "(3, 32, 32)", "True"]


def test_large_images_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running = most = 0
    load = decode._load

    def watch(*arguments: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.01)
        running -= 1
        return load(*arguments)

    monkeypatch.setattr(decode, "LARGE_PIXELS", 5)
    monkeypatch.setattr(decode, "_load", watch)
    images = decode_images([saved(Image.fromarray(GREY), "PNG")] * 8, None, None, workers=8)
    assert [image.tolist() for image in images] == [[[[0, 0, 15], [16, 128, 255]]]] * 8  # type: ignore[union-attr]
    assert most == 1


def test_an_image_with_the_largest_number_of_pixels_is_decoded() -> None:
    side = int(MAX_PIXELS**0.5)
    assert decode_image(saved(Image.new("1", (side, side), 1), "PNG"), 2, 1).tolist() == [[[255] * 2] * 2]
    with pytest.raises(Image.DecompressionBombError):
        decode_image(saved(Image.new("1", (side, side + 1), 1), "PNG"), 2, 1)
