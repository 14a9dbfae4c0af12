"""The cached pixels of image folders, in segments: files that never change.

A new state of a folder links the segments of an earlier one, and adds a segment with the new images. So only
these are decoded and written. A new segment absorbs those that are not larger than itself, and those of which
less than half is in use. So n images are in at most about log2(n) segments.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedseal.data import cache
from fedseal.data.cache import FileState
from fedseal.data.hashed_files import HashingFile, verify, write_array
from fedseal.data.pool import Pixels
from fedseal.system.files import lock_folder

Place = tuple[str, int]  # the file of a segment, and a row in it
# Yields the pixels of the files with these numbers, or the reasons why they are skipped.
Decode = Callable[[Sequence[int]], Iterator[Pixels | str]]


@dataclass(frozen=True)
class Reused:
    """What a new state takes from an earlier one."""

    places: dict[int, Place] = field(default_factory=dict)  # by number of the file
    kept: dict[str, str] = field(default_factory=dict)  # linked segments and their checksums
    absorbed: dict[str, Pixels] = field(default_factory=dict)  # segments to be copied into the new one
    next_name: str = "pixels-0.bin"


def write_segments(
    new: Path, former: Path | None, states: Sequence[FileState], shape: Sequence[int], decode: Decode
) -> tuple[dict[str, Any], dict[int, str]]:
    """Writes the images of files into the folder `new`. `former` is the folder of an earlier state.

    Returns a description for `cache.publish`, and the reasons why files are skipped, by number. Raises an
    OSError, ValueError, KeyError or TypeError if `former` is damaged.
    """
    reused = _reuse(new, former, states, shape) if former else Reused()
    places, segments, skipped = dict(reused.places), dict(reused.kept), dict[int, str]()
    missing = [i for i in range(len(states)) if i not in places]
    added = new / reused.next_name
    with added.open("wb") as file:
        out, count = HashingFile(file), 0
        for i, (segment, row) in reused.places.items():
            if segment in reused.absorbed:
                out.write(reused.absorbed[segment][row].data)
                places[i], count = (added.name, count), count + 1
        for i, image in zip(missing, decode(missing), strict=True):
            if isinstance(image, str):
                skipped[i] = image
            else:
                out.write(np.ascontiguousarray(image).data)
                places[i], count = (added.name, count), count + 1
    if count:
        segments[added.name] = out.sum.hexdigest()
    else:
        added.unlink()

    number = {name: number for number, name in enumerate(segments)}
    rows = [(number[segment], row) for _, (segment, row) in sorted(places.items())]
    files = json.dumps([states[i] for i in sorted(places)]).encode()
    (new / "files.json").write_bytes(files)
    sums = segments | {
        "places.npy": write_array(new / "places.npy", np.array(rows, np.int64).reshape(-1, 2)),
        "files.json": hashlib.sha256(files).hexdigest(),
    }
    return {"segments": list(segments), "shape": list(shape), "sha256": sums}, skipped


def _reuse(new: Path, former: Path, states: Sequence[FileState], shape: Sequence[int]) -> Reused:
    """Finds the images of an earlier state that are still needed, and links segments into `new`."""
    with lock_folder(former, exclusive=False):
        known, about = _read_former(former)
        places = {i: known[state] for i, state in enumerate(states) if state in known}
        segments = {name: cache.map_segment(former / name, shape) for name in about["segments"]}
        sizes = {name: len(images) for name, images in segments.items()}
        used = Counter(segment for segment, _ in places.values())
        kept = {name: about["sha256"][name] for name in choose_kept(used, sizes, len(states) - len(places))}
        absorbed = {name: segments[name] for name in used if name not in kept}
        for name in absorbed:  # those that are kept are verified when the new state is loaded
            verify(former / name, about["sha256"][name])
        for name in kept:
            _link(former / name, new / name)
    last = max(int(name.removeprefix("pixels-").removesuffix(".bin")) for name in segments)
    return Reused(places, kept, absorbed, f"pixels-{last + 1}.bin")


def choose_kept(used: Mapping[str, int], sizes: Mapping[str, int], added: int) -> list[str]:
    """The segments that a new one with `added` images does not absorb. `used` counts images in use."""
    kept = []
    for name in sorted(used, key=lambda name: used[name]):
        if used[name] <= added or 2 * used[name] < sizes[name]:
            added += used[name]
        else:
            kept.append(name)
    return [name for name in sizes if name in kept]


def _read_former(former: Path) -> tuple[dict[FileState, Place], dict[str, Any]]:
    """Where an earlier state of the folder has the image of each file, and the state's description."""
    about = cache.read_about(former)
    for name in ("files.json", "places.npy"):
        verify(former / name, about["sha256"][name])
    files = json.loads((former / "files.json").read_bytes())
    places = np.load(former / "places.npy", allow_pickle=False).tolist()
    found = zip(files, places, strict=True)
    return {tuple(state): (about["segments"][segment], row) for state, (segment, row) in found}, about


def _link(existing: Path, new: Path) -> None:
    try:
        os.link(existing, new)
    except OSError:  # the file system has no hard links
        shutil.copyfile(existing, new)
