"""The sections of a report that need only the numbers of a run."""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from html import escape
from itertools import islice

from fedseal.report import charts
from fedseal.report.charts import Points
from fedseal.report.page import notes, section, table
from fedseal.report.run import Run, finite_points, format_left_out, format_rounds
from fedseal.report.titles import EXPLANATIONS, accuracy_title, heading, metric_title, model_of
from fedseal.run_setup import images_are_elsewhere
from fedseal.storage.accuracies import averaged_over, judged_by
from fedseal.storage.summary import describe_privacy

COUNTS, RATES = "Images that clients learn from", "Correct labels"
SKIPPED_SHOWN = 100


def accuracy_sections(run: Run) -> list[str]:
    """All accuracies of a run, in a table and by round."""
    summary, labels = run.summary, run.summary["labels"]
    rows = [["", "last ten rounds", "last round", "best on validation"]]
    for name in run.accuracies:
        values = [f"{summary[name][kind]:.2%}" for kind in ("mean_last_10", "last", "best_on_validation")]
        rows.append([accuracy_title(name), *values])
    facts = (
        f"{summary['rounds']} rounds, {summary['clients']} clients, {labels['total']} labelled images"
        f" ({labels['training']} for training, {labels['validation']} for validation),"
        f" {summary['seconds'] / 60:.1f} minutes, split {summary['split']}"
    )
    if run.unfinished:
        facts += f"; a continuation to {run.config.rounds} rounds has not finished"
    if left_out := format_left_out(summary):
        facts += f"; replies left out: {left_out}"
    text = f"<p>{escape(facts)}.</p><p>Result: {escape(run.result)}, {averaged_over(summary['rounds'])}.</p>"

    series = {accuracy_title(name): run.points(name) for name in run.accuracies}
    if run.baseline:
        name = judged_by(summary, "model")
        events = [event for event in run.baseline if event["t"] <= summary["rounds"]]
        series[f"Server-SL, {accuracy_title(name)}"] = finite_points(events, name)
    chart = charts.line_chart(series, percent=True) + _explain(run.accuracies, [run])
    return [section("Accuracy", text + table(rows)), section("Accuracy by round", chart)]


def _explain(accuracies: Iterable[str], runs: Iterable[Run]) -> str:
    """What the models with these accuracies are; a method may have its own explanation."""
    explanations = [{**EXPLANATIONS, **run.method.explanations} for run in runs]
    return notes(explained[model_of(name)] for name in accuracies for explained in explanations)


def accuracy_comparison(runs: Mapping[str, Run]) -> list[str]:
    """The accuracies of several runs, by label: a table, then a chart for each accuracy."""
    names = [*dict.fromkeys(name for run in runs.values() for name in run.accuracies)]
    rows = [["run", "rounds", "result", *map(accuracy_title, names), "split"]]
    for label, run in runs.items():
        means = [f"{run.summary[n]['mean_last_10']:.2%}" if n in run.summary else "–" for n in names]
        rows.append([label, str(run.summary["rounds"]), run.result, *means, str(run.summary["split"])])
    sections = [section("Accuracy", table(rows) + "<p>Means over the last ten rounds.</p>")]
    if len({run.summary["split"] for run in runs.values()}) > 1:
        sections.append(
            "<p class=warning>These runs have different splits: compare their margins over a baseline on the"
            " same split, not their accuracies.</p>"
        )
    for name in names:
        chart = charts.line_chart({label: run.points(name) for label, run in runs.items()}, percent=True)
        title = f"Accuracy by round: {accuracy_title(name)}"
        sections.append(section(title, chart + _explain([name], runs.values())))
    return sections


def method_sections(runs: Mapping[str, Run]) -> list[str]:
    """The methods' own numbers by round, of runs by label; a single run needs no label.

    Counts share a chart, and so do correct rates. Any other number has a chart of its own, with a line per
    run. A list has a chart per run, with a line per class.
    """
    counts: dict[str, Points] = {}
    rates: dict[str, Points] = {}
    numbers: dict[str, dict[str, Points]] = defaultdict(dict)
    lists: dict[str, dict[str, Points]] = {}
    explained: dict[str, list[str]] = defaultdict(list)  # by heading
    for label, run in runs.items():
        for name, kind in run.metrics.items():
            title = metric_title(run.method, name)
            if kind == "count":
                above = COUNTS
                counts[_join(label, title)] = run.points(name)
            elif kind == "number":
                above = f"{heading(title)} by round"
                numbers[above][label or title] = run.points(name)
            else:
                above = f"{heading(title)} by class" + (f": {label}" if label else "")
                lists[above] = run.points_by_class(name)
            if name in run.method.explanations:
                explained[above].append(run.method.explanations[name])
        for name in run.correct_rates:
            rates[_join(label, metric_title(run.method, name))] = run.points(f"{name}_correct")
    explained[RATES].append("The share of these labels that is correct. Only a simulation can know it.")
    charted = [*lists.items(), (COUNTS, counts), (RATES, rates), *numbers.items()]
    return [
        section(title, charts.line_chart(series, percent=title == RATES) + notes(explained[title]))
        for title, series in charted
        if any(series.values())
    ]


def _join(label: str, title: str) -> str:
    return f"{label}, {title}" if label else title


def privacy_section(run: Run) -> list[str]:
    """With differential privacy: the guarantee, and how ε grew."""
    words = describe_privacy(run.summary)
    if not words:
        return []
    chart = charts.line_chart({"ε spent": points}) if (points := run.points("epsilon")) else ""
    explained = [
        "ε bounds what anybody can learn about a client's images from what it uploaded: the smaller, the"
        " better (docs/privacy.md).",
        "Numbers that only a simulation knows, such as accuracies on clients' images, are not covered.",
        "The noise comes from the operating system, not from the seed: a repeated run has other results.",
    ]
    return [section("Differential privacy", f"<p>{escape(words)}.</p>" + chart + notes(explained))]


def problems_section(run: Run, skipped: Mapping[str, str]) -> list[str]:
    """The clients that were left out of rounds, and the files that were skipped, with the reasons."""
    content = ""
    if run.left_out:
        rounds: dict[tuple[str, str], list[int]] = defaultdict(list)
        for event in run.left_out:
            rounds[event["client"], event["reason"]].append(event["t"])
        rows = [[client, format_rounds(found), reason] for (client, reason), found in rounds.items()]
        content += "<h3>Clients left out of a round</h3>" + table([["client", "rounds", "reason"], *rows])
    if skipped:
        rows = [[file, reason] for file, reason in islice(skipped.items(), SKIPPED_SHOWN)]
        content += f"<h3>Skipped files ({len(skipped)})</h3>" + table([["file", "reason"], *rows])
        if len(skipped) > len(rows):
            content += f"<p>The first {len(rows)} of {len(skipped)} files.</p>"
    return [section("Problems", f'<div class="text">{content}</div>')] if content else []


def reproduction_section(run: Run) -> str:
    """The commands that repeat a run, the versions, and the whole configuration."""
    repeat = ["fedseal", "train", str(run.folder / "config.toml"), "--out", "repeated"]
    repeat += ["--set", f"rounds={run.summary['rounds']}"] if run.unfinished else []
    evaluate = ["fedseal", "evaluate", str(run.folder)]
    elsewhere = images_are_elsewhere(run.config)
    commands = "\n".join(map(shlex.join, [[*evaluate, "--test", "DIR"]] if elsewhere else [repeat, evaluate]))
    versions = ", ".join(f"{name} {number}" for name, number in run.summary["versions"].items())
    text = (
        f"<pre>{escape(commands)}</pre><p>Versions: {escape(versions)}.</p>"
        f"<details><summary>config.toml</summary><pre>{escape(run.config.to_toml())}</pre></details>"
    )
    return section(f"Reproduce: {run.name}", text)
