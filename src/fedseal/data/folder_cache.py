"""Image folders in the cache: from the list of their files to a pool."""

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedseal.data import cache
from fedseal.data.pool import Ints, Pool
from fedseal.data.segments import Decode, write_segments
from fedseal.errors import UserError
from fedseal.system.logs import log


class NoImageError(UserError):
    """A client's folder has no readable image."""


@dataclass(frozen=True)
class Listing:
    """The files of one part of a pool, before they are decoded."""

    folder: Path
    files: Sequence[Path]
    labels: Ints  # -1 if unknown
    classes: tuple[str, ...] = ()  # empty if the images have no labels
    needed: tuple[str, ...] = ()  # classes that have a folder
    stray: dict[str, str] = field(default_factory=dict)  # files beside the folders -> reason

    def keep(self, kept: Sequence[int]) -> Ints:
        """The labels of the readable images. Refuses a client or a class without any."""
        labels = self.labels[list(kept)]
        if not self.classes and not kept:
            raise NoImageError(
                f"Client '{self.folder.name}' has no readable image: add images to {self.folder}, or remove"
                " it."
            )
        for name in self.needed:
            if not np.any(labels == self.classes.index(name)):
                raise UserError(
                    f"Class '{name}' has no readable image: add images to {self.folder / name}, or remove it."
                )
        return labels


def cache_folders(
    key: str, path: Path, listed: Mapping[str, Listing], shape: Sequence[int], decode: Decode
) -> Pool:
    """Builds the pool of these files in the cache, as far as possible from an earlier state of the folder."""
    states = [cache.file_state(path, file) for listing in listed.values() for file in listing.files]
    for former in [*cache.former_states(key)[:1], None]:
        with cache.workspace() as work:
            new = work / "new"
            new.mkdir()
            try:
                written, reasons = write_segments(new, former, states, shape, decode)
            except (OSError, ValueError, KeyError, TypeError) as error:
                if former is None or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
                    raise
                log.info("the cache %s cannot be used (%s): all images are decoded", former, error)
                continue
            pool = _describe(listed, reasons, shape)
            stored = cache.publish(new, key, pool, f"the folder {path.resolve()}", written)
        if stored is not None:
            return stored
    raise UserError(f"Cannot read back the cache {cache.root() / key}: check the disk, or set FEDSEAL_DATA.")


def _describe(listed: Mapping[str, Listing], reasons: Mapping[int, str], shape: Sequence[int]) -> Pool:
    """The pool of all files except those that are skipped, without the pixels, which are on disk."""
    labels, parts, skipped = [], {}, {}
    start = number = 0
    for name, listing in listed.items():
        kept = [i for i in range(len(listing.files)) if number + i not in reasons]
        labels.append(listing.keep(kept))
        parts[name] = range(start, start + len(kept))
        for i, file in enumerate(listing.files):
            if number + i in reasons:
                skipped[str(file)] = reasons[number + i]
        skipped |= listing.stray
        start += len(kept)
        number += len(listing.files)
    pixels = np.zeros((0, *shape), np.uint8)
    classes = next(iter(listed.values())).classes  # the server's, or none
    return Pool("folders", pixels, np.concatenate(labels), classes, parts, False, skipped)
