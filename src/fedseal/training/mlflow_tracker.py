"""Logs a run to MLflow, on a server or in a folder."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from fedseal.config.config import Config, flatten
from fedseal.errors import UserError
from fedseal.rounds import Event, RoundDone
from fedseal.system.files import write_atomic
from fedseal.system.lazy import LazyModule
from fedseal.system.logs import log
from fedseal.training.observers import tags

if TYPE_CHECKING:
    import mlflow
    from mlflow import entities
else:
    mlflow = LazyModule("mlflow")
    entities = LazyModule("mlflow.entities")

EXPERIMENT = "fedseal"
BATCH = 100  # values that a server takes at once


class MLflow:
    """Logs the settings, the numbers of every round, and the model file. A resumed run is continued.

    A store that fails later does not end the run.
    """

    def __init__(self, where: str, config: Config, folder: Path) -> None:
        self.where, self.config, self.folder = where, config, folder
        self.run_id, self.logged, self.failed = "", 0, False
        self.file = folder / "checkpoint" / "mlflow-run"
        uri = where if "://" in where else Path(where).resolve().as_uri()
        if "://" not in where and (other := _find_other(Path(where))):
            raise UserError(
                f"{where} is no MLflow store, because it holds the folder {other}: give a new folder."
            )
        try:
            self.client = mlflow.MlflowClient(uri)
            found = self.client.get_experiment_by_name(EXPERIMENT)
            self.experiment = found.experiment_id if found else self.client.create_experiment(EXPERIMENT)
        except UserError:
            raise
        except Exception as error:  # MLflow raises many different exceptions
            raise UserError(f"MLflow cannot use '{where}': {_first_line(error)}") from error

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RoundDone) or self.failed:
            return
        try:
            self.run_id = self.run_id or self._start()
            if event.t > self.logged:
                self._log_round(event)
        except Exception as error:
            self.failed = True
            log.warning("MLflow: %s; the run goes on without it", _first_line(error))

    def close(self) -> None:
        model = self.folder / "model.safetensors"
        if self.failed:
            return
        try:
            if not self.run_id and model.exists() and self.file.exists():
                before = self.file.read_text("utf-8")
                if self._last_round(before) >= self.config.rounds:  # it was stopped before its last file
                    self.run_id, self.logged = before, self.config.rounds
            if not self.run_id:
                return
            if finished := self.logged >= self.config.rounds and model.exists():
                self.client.log_artifact(self.run_id, str(model))
            self.client.set_terminated(self.run_id, "FINISHED" if finished else "KILLED")
        except Exception as error:
            log.warning("MLflow: %s; the model is in %s", _first_line(error), model)

    def _start(self) -> str:
        """The number of a new MLflow run, or of the one that is continued."""
        if self.file.exists():
            run_id = self.file.read_text("utf-8")
            self.client.update_run(run_id, "RUNNING")
            self.logged = self._last_round(run_id)
            return run_id
        run = self.client.create_run(self.experiment, run_name=self.folder.name)
        run_id = str(run.info.run_id)
        params = [entities.Param(key, str(value)) for key, value in flatten(self.config.to_dict()).items()]
        for start in range(0, len(params), BATCH):
            self.client.log_batch(run_id, params=params[start : start + BATCH])
        write_atomic(self.file, run_id)
        return run_id

    def _last_round(self, run_id: str) -> int:
        history = self.client.get_metric_history(run_id, "seconds/server")
        return max((int(point.step) for point in history), default=0)

    def _log_round(self, event: RoundDone) -> None:
        now = int(1000 * time.time())
        points = [entities.Metric(key, value, now, event.t) for key, value in tags(event.metrics).items()]
        for start in range(0, len(points), BATCH):
            self.client.log_batch(self.run_id, metrics=points[start : start + BATCH])
        self.logged = event.t


def _find_other(folder: Path) -> str:
    """The name of a subfolder by which a folder is no store of MLflow; empty for a store and a new folder."""
    if not folder.is_dir() or (folder / ".trash").is_dir():  # MLflow creates it in each store
        return ""
    others = (path.name for path in sorted(folder.iterdir()) if path.is_dir() and path.name[0] != ".")
    return next((name for name in others if not (folder / name / "meta.yaml").exists()), "")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
