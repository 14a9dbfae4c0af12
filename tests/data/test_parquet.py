"""Images in Parquet files: what is read, what is skipped, and what is refused."""

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedseal.data import parquet
from fedseal.data.parquet import read_parquet
from fedseal.errors import UserError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSEAL_DATA", str(tmp_path / "cache"))


def write_parquet(
    path: Path,
    images: list[bytes | None],
    labels: list[int],
    classes: list[str] | None = None,
    image: str = "image",
) -> None:
    table = pa.table(
        {
            image: pa.array(
                [{"bytes": data, "path": None} for data in images],
                pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
            ),
            "label": pa.array(labels, pa.int64()),
        }
    )
    if classes:
        about = {"info": {"features": {"label": {"names": classes, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def png(shade: int, size: int = 8, mode: str = "L") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (size, size), shade if mode == "L" else (shade, 0, 0)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize("other", ["train-1", "test-0"])
def test_files_must_name_the_same_classes(other: str, tmp_path: Path) -> None:
    for name in ("train-0", "train-1", "test-0"):
        classes = ["yes", "no"] if name == other else ["no", "yes"]
        write_parquet(tmp_path / "p" / f"{name}.parquet", [png(1)], [0], classes)
    with pytest.raises(UserError, match=r"\.parquet names other classes .*, or in another order: write all"):
        read_parquet(tmp_path / "p", size=8, channels=1)


def test_own_parquet_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "p"
    write_parquet(folder / "train-0.parquet", [png(1), png(2)], [0, 1], ["no", "yes"], image="img")
    write_parquet(folder / "train-1.parquet", [png(3)], [1], image="img")
    write_parquet(folder / "test-0.parquet", [png(4)], [0], image="img")
    write_parquet(folder / "validation-0.parquet", [png(5)], [1], image="img")  # not used
    pool = read_parquet(folder)
    assert pool.pixels[:, 0, 0, 0].tolist() == [1, 2, 3, 4] and pool.labels.tolist() == [0, 1, 1, 0]
    assert pool.parts == {"train": range(3), "test": range(3, 4)}
    assert pool.classes == ("no", "yes") and pool.flips is False and pool.name == "parquet"
    larger = read_parquet(folder, size=16, channels=3)
    assert larger.pixels.shape == (4, 3, 16, 16)
    monkeypatch.setattr(parquet, "read_parts", lambda *_: pytest.fail("decoded again"))
    assert np.array_equal(read_parquet(folder).pixels, pool.pixels)


def test_broken_rows_are_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_parquet(tmp_path / "train.parquet", [png(1), b"no image", None, png(2)], [0, 1, 1, 1])
    write_parquet(tmp_path / "test.parquet", [png(4)], [0])
    with caplog.at_level(logging.WARNING, "fedseal"):
        pool = read_parquet(tmp_path)
    assert len(pool.labels) == 3 and pool.classes == ("0", "1")
    assert [name.rpartition("/")[2] for name in pool.skipped] == [
        "train.parquet row 1",
        "train.parquet row 2",
    ]
    assert "row 1 of" in caplog.text


def test_a_row_that_does_not_fit_into_memory_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("train", "test"):
        write_parquet(tmp_path / f"{part}.parquet", [png(1), png(2)], [0, 1])
    with monkeypatch.context() as patched:
        patched.setattr(parquet, "decode_images", lambda *_: iter([MemoryError(), MemoryError()]))
        with pytest.raises(UserError, match=r"Not enough memory for row 0 of .*train.parquet"):
            read_parquet(tmp_path, progress=False)
    assert read_parquet(tmp_path, progress=False).skipped == {}


def test_rows_without_a_label_are_skipped(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [png(1), png(2)], [0, 1])
    write_parquet(tmp_path / "test.parquet", [png(4), png(5)], [-1, 1])
    pool = read_parquet(tmp_path)
    assert pool.labels.tolist() == [0, 1, 1] and list(pool.skipped) == [f"{tmp_path / 'test.parquet'} row 0"]


def test_refused_parquet(tmp_path: Path) -> None:
    def refuse(message: str) -> None:
        with pytest.raises(UserError, match=message) as caught:
            read_parquet(tmp_path)
        assert str(tmp_path) in str(caught.value)

    refuse(r"has no train\*")
    write_parquet(tmp_path / "train.parquet", [png(1), png(1, 9)], [0, 1])
    refuse("differ in size or colour")
    write_parquet(tmp_path / "train.parquet", [png(1)], [1])
    refuse(r"has no test\*")
    write_parquet(tmp_path / "test.parquet", [png(1, mode="RGB")], [1])
    refuse("differ in size or colour")
    write_parquet(tmp_path / "test.parquet", [png(1)], [5], ["only", "two"])
    write_parquet(tmp_path / "train.parquet", [png(1)], [1], ["only", "two"])
    refuse("has a label 5 but names 2 classes")
    write_parquet(tmp_path / "test.parquet", [png(1)], [0], image="picture")
    refuse("needs the columns image and label")
    write_parquet(tmp_path / "test.parquet", [b"no"], [0])
    refuse("has no readable image")
    pq.write_table(pa.table({"image": [b"plain"], "label": [0]}), tmp_path / "test.parquet")
    refuse("is not a Parquet file of images")
    wide = io.BytesIO()
    Image.new("L", (8, 4)).save(wide, "PNG")
    write_parquet(tmp_path / "train.parquet", [wide.getvalue()], [0])
    refuse(r"are 8×4, not square: set data\.size")
    write_parquet(tmp_path / "train.parquet", [png(1)], [1], ["only", "two"])
    (tmp_path / "test.parquet").write_bytes(b"PAR1 not really")
    refuse("is not a Parquet file")


def test_special_files_are_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.parquet")  # opening it would wait for ever
    with pytest.raises(UserError, match=r"has no train\*\.parquet"):
        read_parquet(tmp_path)


@pytest.mark.parametrize(("size", "result"), [(32, "1001"), (512, "expands to more than 2,000 times")])
def test_a_file_that_expands_to_gigabytes_takes_little_memory(size: int, result: str, tmp_path: Path) -> None:
    """One image of 4.3 MB, to which a thousand rows refer: 4.3 GB in a few kilobytes."""
    write_repeated(tmp_path / "train.parquet", png(3) + bytes(4_300_000), 1000)
    write_parquet(tmp_path / "test.parquet", [png(4)], [0])
    assert (tmp_path / "train.parquet").stat().st_size < 10_000
    found, peak = read_elsewhere(tmp_path, size)
    assert result in found and peak < 1_500_000  # kB


def write_repeated(file: Path, image: bytes, rows: int) -> None:
    """A file with one image, to which all rows refer."""
    content = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([image]))
    images = pa.StructArray.from_arrays([content], ["bytes"])
    table = pa.table({"image": images, "label": pa.array(np.zeros(rows, np.int64))})
    options = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30, "store_schema": False}
    pq.write_table(table, file, **options)


def read_elsewhere(folder: Path, size: int) -> tuple[str, int]:
    """Reads a folder in another process: the number of images or the error, and the peak of memory in kB."""
    code = """
import re, sys
from pathlib import Path
from fedseal.data.parquet import read_parquet
from fedseal.errors import UserError

try:
    print(len(read_parquet(Path(sys.argv[1]), size=int(sys.argv[2]), channels=3, progress=False).labels))
except UserError as error:
    print(error)
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""
    command = [sys.executable, "-c", code, folder, str(size)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    found, peak = answer.stdout.splitlines()
    return found, int(peak)


def test_a_file_with_false_sizes_takes_little_memory(tmp_path: Path) -> None:
    """One image of 100 MB, to which 16 rows refer: the file says that they have 5,000 bytes."""
    file = tmp_path / "train.parquet"
    write_repeated(file, bytes(100_000_000), 16)
    group, content = pq.ParquetFile(file).metadata.row_group(0), file.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer = content[start:]
    for size in {group.total_byte_size, group.column(0).total_uncompressed_size}:
        true, length = varint(size), len(varint(size))
        assert true in footer
        footer = footer.replace(true, varint(5000, length))
    file.write_bytes(content[:start] + footer)
    write_parquet(tmp_path / "test.parquet", [png(4)], [0])
    found, peak = read_elsewhere(tmp_path, 32)
    assert "train.parquet expands to more than 2,000 times" in found and peak < 1_700_000  # kB


def varint(number: int, length: int = 0) -> bytes:
    """An integer in Thrift's compact form, with leading zeros up to a length."""
    parts, number = [], 2 * number
    while number or len(parts) < length:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts[:-1], parts[-1] & 127])


def test_a_file_with_several_pages_and_row_groups(tmp_path: Path) -> None:
    """Its images are partly in a dictionary and partly not."""
    images = [png(i % 256, 8 + i // 256) + bytes(3000) for i in range(1100)]
    for number, part in enumerate((images[:700], images[700:])):
        write_parquet(tmp_path / f"train-{number}.parquet", part, [i % 5 for i in range(len(part))])
    table = pq.read_table(tmp_path / "train-0.parquet")
    options = {"row_group_size": 300, "data_page_size": 10_000, "dictionary_pagesize_limit": 100_000}
    pq.write_table(table, tmp_path / "train-0.parquet", **options)
    write_parquet(tmp_path / "test.parquet", [png(4)], [0])
    pool = read_parquet(tmp_path, size=8, channels=1)
    assert pool.pixels[:1100, 0, 0, 0].tolist() == [i % 256 for i in range(1100)]


def test_a_highly_compressed_column_is_refused_before_it_is_read(tmp_path: Path) -> None:
    table = pa.table(
        {"image": [{"bytes": bytes(1 << 20)}] * 300, "label": [0] * 300},
        schema=pa.schema([("image", pa.struct([("bytes", pa.binary())])), ("label", pa.int64())]),
    )
    pq.write_table(table, tmp_path / "train.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(UserError, match=r"train\.parquet expands to more than 2,000 times its size"):
        read_parquet(tmp_path)
