"""The data sources by name. To add one, write its function and add it to `SOURCES`."""

from collections.abc import Callable
from pathlib import Path

from fedseal.config.sections import DataSettings
from fedseal.data.catalogue import PUBLISHED
from fedseal.data.folders import load_folders
from fedseal.data.parquet import load_parquet
from fedseal.data.pool import Pool
from fedseal.errors import UserError

# Each entry takes the `[data]` section and whether to show progress.
SOURCES: dict[str, Callable[[DataSettings, bool], Pool]] = {
    **{name: dataset.load for name, dataset in PUBLISHED.items()},
    "parquet": load_parquet,
    "folders": load_folders,
}


def load_pool(data: DataSettings, *, progress: bool) -> Pool:
    """All images of the source that the `[data]` section names."""
    if data.source not in SOURCES:
        raise UserError(f"There is no data source '{data.source}': choose one of {', '.join(SOURCES)}.")
    return SOURCES[data.source](data, progress)


def get_published(name: str, from_dir: Path | None = None, *, progress: bool = True) -> Pool:
    """A published data set by name, downloaded if necessary, or imported from the folder `from_dir`."""
    if name not in PUBLISHED:
        raise UserError(f"There is no data set '{name}': choose one of {', '.join(PUBLISHED)}.")
    return PUBLISHED[name].get(from_dir, progress=progress)
