"""A finished run, as a report reads it from its folder."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedseal.config.config import Config
from fedseal.config.load import load_config
from fedseal.core import Method, Metrics
from fedseal.data.catalogue import PUBLISHED
from fedseal.errors import UserError
from fedseal.methods.loader import section_name
from fedseal.replies import is_reserved
from fedseal.report.charts import Points
from fedseal.report.titles import MODELS
from fedseal.storage.accuracies import judged_by
from fedseal.storage.events_file import read_events, read_rounds, read_rounds_until
from fedseal.storage.model_file import read_classes
from fedseal.storage.summary import read_summary_file

Kind = Literal["count", "number", "list"]  # a list has one value per class


@dataclass(frozen=True)
class Run:
    """The files of a run: configuration, summary and rounds."""

    folder: Path
    config: Config
    summary: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]  # one per round
    left_out: Sequence[Mapping[str, Any]] = field(default_factory=list)  # one per unused reply
    baseline: Sequence[Mapping[str, Any]] = field(default_factory=list)  # rounds of Server-SL, same split

    @staticmethod
    def read(folder: Path) -> "Run":
        """Reads a run folder; the model is not needed."""
        path = folder / "summary.json"
        try:
            summary = read_summary_file(path)
        except (FileNotFoundError, ValueError) as error:
            raise UserError(
                f"{folder} does not contain a finished run: its summary.json is missing or damaged."
            ) from error
        except OSError as error:
            raise UserError(
                f"Cannot read {path} ({error.strerror}): check the file, then try again."
            ) from error
        events = read_rounds_until(folder, summary["rounds"])
        logged = read_events(folder / "events.jsonl")
        left_out = [e for e in logged if e["event"] == "left-out" and e["t"] <= summary["rounds"]]
        config = load_config(folder / "config.toml")
        return Run(folder, config, summary, events, left_out, read_rounds(folder / "server-sl"))

    @property
    def name(self) -> str:
        return f"{section_name(self.config.method)}, seed {self.config.seed}"

    @property
    def unfinished(self) -> bool:
        """Whether the finished run was continued for more rounds, of which some are missing."""
        return self.config.rounds != int(self.summary["rounds"])

    @property
    def method(self) -> Method:
        return self.config.selected_method()

    @property
    def accuracies(self) -> list[str]:
        """The names of all accuracies that were measured."""
        return [name for name in self.summary if name.endswith("accuracy")]

    @property
    def result(self) -> str:
        """The accuracy by which the run is judged, in words."""
        model = self.summary["evaluate"]
        name = judged_by(self.summary, model)
        images = "validation" if name.endswith("validation_accuracy") else "test"
        return f"{self.summary[name]['mean_last_10']:.2%} on the {images} images ({MODELS[model]})"

    @property
    def metrics(self) -> dict[str, Kind]:
        """The method's own numbers, in order of appearance."""
        kinds: dict[str, Kind] = {}
        for event in self.events:
            for name, value in own_metrics(event).items():
                if isinstance(value, list):
                    kinds[name] = "list"
                elif isinstance(value, float):  # a float metric may be a whole number in some rounds
                    kinds[name] = "number"
                else:
                    kinds.setdefault(name, "count")
        return kinds

    @property
    def correct_rates(self) -> list[str]:
        """The names of the labels whose correct rate is known."""
        names = dict.fromkeys(name for event in self.events for name in event if name.endswith("_correct"))
        return [name.removesuffix("_correct") for name in names]

    def points(self, name: str) -> Points:
        """A number by round; values that are not finite are left out."""
        return finite_points(self.events, name)

    def points_by_class(self, name: str) -> dict[str, Points]:
        """A list with one value per class, as one series per class."""
        rounds = [(event["t"], event[name]) for event in self.events if isinstance(event.get(name), list)]
        count = max((len(values) for _, values in rounds), default=0)
        series = {}
        for m, class_name in enumerate(self.class_names(count)):
            values = [{"t": t, name: values[m]} for t, values in rounds if m < len(values)]
            series[class_name] = finite_points(values, name)
        return series

    def class_names(self, count: int) -> Sequence[str]:
        """The names of the classes, or numbers if the folder does not tell the names."""
        names: Sequence[str] = ()
        if (path := self.folder / "model.safetensors").exists():
            names = read_classes(path)
        elif self.config.data.source in PUBLISHED:
            names = PUBLISHED[self.config.data.source].classes
        return names if len(names) == count else [str(m) for m in range(count)]


def own_metrics(event: Mapping[str, Any]) -> Metrics:
    """The numbers in a round's event that the method, not the server, has put there."""
    return {
        name: value
        for name, value in event.items()
        if not is_reserved(name) and isinstance(value, int | float | list)
    }


def finite_points(events: Sequence[Mapping[str, Any]], name: str) -> Points:
    """A number of these events by round; values that are not finite are left out."""
    found = [(event["t"], event.get(name)) for event in events]
    return [(t, value) for t, value in found if isinstance(value, int | float) and math.isfinite(value)]


def format_rounds(rounds: Sequence[int]) -> str:
    """Rounds in ascending order, in short: "1–3, 5"."""
    spans: list[list[int]] = []
    for t in rounds:
        if spans and t == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], t]
        else:
            spans.append([t])
    return ", ".join("–".join(map(str, span)) for span in spans)


def format_left_out(summary: Mapping[str, Any]) -> str:
    """The number of unused replies of each client, such as "2 of client-3"; empty if all were used."""
    return ", ".join(f"{number} of {name}" for name, number in summary.get("left_out", {}).items())
