"""Writes `report.html`: one run, or several side by side."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from fedseal.config.load import load_config
from fedseal.data.federation import load_federation
from fedseal.data.pool import Federation
from fedseal.engines.memory_store import MemoryStore
from fedseal.errors import UserError
from fedseal.report.image_sections import image_sections
from fedseal.report.page import render_page
from fedseal.report.run import Run
from fedseal.report.sections import (
    accuracy_comparison,
    accuracy_sections,
    method_sections,
    privacy_section,
    problems_section,
    reproduction_section,
)
from fedseal.run_setup import RunSetup, images_are_elsewhere
from fedseal.storage.checkpoint import memories_file
from fedseal.storage.run_folder import checkpoint_file, checkpoint_fingerprint, require_run
from fedseal.system.environment import set_up_process
from fedseal.system.files import write_atomic
from fedseal.system.machine import threads


def write_report(
    folder: Path, setup: RunSetup | None, memories: MemoryStore, path: Path | None = None
) -> Path:
    """Writes the report of a finished run, by default into its folder.

    `memories` are those of the clients. Without `setup` the report shows no images.
    """
    run = Run.read(folder)
    sections = [*accuracy_sections(run), *privacy_section(run), *method_sections({"": run})]
    sections += image_sections(run, setup, memories) if setup else []
    sections += problems_section(run, setup.federation.pool.skipped if setup else {})
    path = path or folder / "report.html"
    title = f"{run.name}: {run.config.data.source}"
    write_atomic(path, render_page(title, [*sections, reproduction_section(run)]), private=True)
    return path


def rewrite_report(folder: Path, path: Path | None = None, federation: Federation | None = None) -> Path:
    """Writes the report of a run from the files in its folder, with images if they and the model are here.

    Without `federation`, the images are loaded.
    """
    require_run(folder)
    config = load_config(folder / "config.toml")
    set_up_process(config.engine.arithmetic)  # features of images are stored by arithmetic
    if images_are_elsewhere(config) or not (folder / "model.safetensors").exists():
        return write_report(folder, None, MemoryStore(), path)
    federation = federation or load_federation(config.data, config.seed)
    if federation.fingerprint != Run.read(folder).summary["split"]:
        raise UserError(
            f"The data have changed since the run in {folder}: restore the same images to write its report."
        )
    setup = RunSetup(config, federation).with_features()
    file = memories_file(checkpoint_file(folder))
    store = MemoryStore(file, checkpoint_fingerprint(setup)) if file.exists() else MemoryStore()
    with closing(store) as memories, threads(config.server.threads):
        return write_report(folder, setup, memories, path)


def compare_runs(folders: Sequence[Path], path: Path) -> Path:
    """Writes a page that compares several finished runs."""
    for folder in folders:
        require_run(folder)
    found = [Run.read(folder) for folder in folders]
    unique = len({run.folder.name for run in found}) == len(found)
    runs = {f"{run.name} ({run.folder.name if unique else run.folder})": run for run in found}
    sections = [*accuracy_comparison(runs), *method_sections(runs)]
    sections += [reproduction_section(run) for run in runs.values()]
    write_atomic(path, render_page("Comparison", sections))
    return path
