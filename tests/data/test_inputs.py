"""Images to predict: every way to give them, and what happens to files that are not images."""

import logging
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedseal.data.inputs import GivenImage, list_inputs, read_batches
from fedseal.errors import UserError

RNG = np.random.default_rng(0)
COLOUR, GREY = RNG.integers(0, 256, (8, 6, 3), np.uint8), RNG.integers(0, 256, (8, 6), np.uint8)


def read(*given: GivenImage, skip: bool = False, batch: int = 100) -> list[np.ndarray]:
    """All images as [3, 4, 4]."""
    inputs = list_inputs(given)
    batches = read_batches(inputs, size=4, channels=3, batch=batch, skip=skip, progress=False)
    return [image for _, images in batches for image in images]


def test_every_way_to_give_an_image_has_the_same_pixels(tmp_path: Path) -> None:
    Image.fromarray(COLOUR).save(tmp_path / "colour.png")
    Image.fromarray(GREY).save(tmp_path / "grey.png")
    colour, grey = read(tmp_path / "colour.png", str(tmp_path / "grey.png"))
    assert not np.array_equal(colour, grey)
    for given in (Image.fromarray(COLOUR), COLOUR, COLOUR[None]):
        np.testing.assert_array_equal(read(given), [colour])
    for given in (Image.fromarray(GREY), GREY, GREY[..., None], GREY[None, ..., None]):
        np.testing.assert_array_equal(read(given), [grey])
    np.testing.assert_array_equal(read(tmp_path, GREY), [colour, grey, grey])
    np.testing.assert_array_equal(read(np.stack([COLOUR, 255 - COLOUR])), [colour, *read(255 - COLOUR)])


def test_one_image_needs_no_list(tmp_path: Path) -> None:
    for one in (tmp_path / "a.png", str(tmp_path / "a.png")):
        assert list_inputs(one) == [(tmp_path / "a.png", False)]
    assert len(list_inputs(COLOUR)) == len(list_inputs(Image.fromarray(GREY))) == 1
    assert len(list_inputs(image for image in (COLOUR, GREY))) == 2
    assert list_inputs(COLOUR[None][:0]) == []


@pytest.mark.parametrize(
    ("array", "shown"),
    [
        (GREY / 255, "float64 [8, 6]"),
        (np.zeros((9, 8, 6), np.uint8), "uint8 [9, 8, 6]"),  # many grey images
        (np.zeros((2, 3, 8, 6), np.uint8), "uint8 [2, 3, 8, 6]"),  # channels first
        (np.zeros(5, np.uint8), "uint8 [5]"),
    ],
)
def test_other_arrays_are_refused(array: np.ndarray, shown: str) -> None:
    with pytest.raises(UserError) as caught:
        list_inputs(array)
    assert str(caught.value) == (
        "An array must be uint8 [H, W], [H, W, C] or [n, H, W, C] with 1 or 3 channels C, not"
        f" {shown}: convert it (images[..., None] adds one to grey images)."
    )


@pytest.mark.parametrize(("given", "name"), [(3, "int"), ([None], "NoneType"), ([[GREY]], "list")])
def test_other_objects_are_refused(given: object, name: str) -> None:
    with pytest.raises(UserError, match=f"paths, PIL images or NumPy arrays, not as {name}"):
        list_inputs(given)  # type: ignore[arg-type]


def test_unreadable_files_are_skipped_in_folders_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, gone = tmp_path / "below" / "notes.txt", tmp_path / "gone.png"
    text.parent.mkdir()
    text.write_text("no image")
    Image.fromarray(GREY).save(tmp_path / "grey.png")
    assert len(read(tmp_path)) == 1
    assert caplog.messages == [f"skipped {text}: not a readable image (unknown format)"]
    with pytest.raises(
        UserError, match=r"notes\.txt is not a readable image \(unknown format\): give another"
    ):
        read(tmp_path, text)
    with pytest.raises(UserError, match=r"There is no image .*gone\.png: check the path\."):
        read(gone)
    caplog.clear()
    assert len(read(gone, GREY, text, skip=True)) == 1
    assert caplog.messages == [
        f"skipped {gone}: not a readable image (No such file or directory)",
        f"skipped {text}: not a readable image (unknown format)",
    ]


def test_many_unreadable_files_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(1200):
        (tmp_path / f"{i:04}.txt").touch()
    assert read(tmp_path) == []
    assert len(caplog.messages) == 11 and caplog.records[0].levelno == logging.WARNING
    assert caplog.messages[-1] == "skipped 1,200 files in all that are not readable images"


def test_batches_name_the_positions_of_their_images(tmp_path: Path) -> None:
    inputs = list_inputs([GREY, tmp_path / "gone", COLOUR, GREY])
    batches = list(read_batches(inputs, size=4, channels=1, batch=2, skip=True, progress=False))
    assert [(rows, images.shape) for rows, images in batches] == [([0, 2], (2, 1, 4, 4)), ([3], (1, 1, 4, 4))]


def test_few_pixels_are_in_memory_at_once(tmp_path: Path) -> None:
    """3,000 images of 64×64 have 37 megabytes of pixels; 1,024 are decoded ahead."""
    Image.new("RGB", (64, 64), "red").save(tmp_path / "0.png")
    for i in range(1, 3000):
        os.link(tmp_path / "0.png", tmp_path / f"{i}.png")
    inputs = list_inputs(tmp_path)
    tracemalloc.start()
    try:
        batches = read_batches(inputs, size=64, channels=3, batch=100, skip=False, progress=False)
        assert sum(len(images) for _, images in batches) == 3000
        assert tracemalloc.get_traced_memory()[1] < 25e6
    finally:
        tracemalloc.stop()
