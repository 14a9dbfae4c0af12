"""Tables of what `make torture` and `make fuzz` measured, for docs/benchmarks.md."""

from bench.page import Found


def tables(torture: Found, memory: Found, fuzz: Found, packets: Found) -> list[str]:
    """Tables of disturbances, of memory, and of changed inputs."""
    done = sorted(torture["disturbances"].items(), key=lambda item: -item[1])
    runs = sum(torture["runs"].values())
    text = ["| disturbance | number |", "|---|---:|", *(f"| {name} | {number:,} |" for name, number in done)]
    text += ["", f"{torture['kills']:,} kills in {runs:,} runs: {torture['lost']} runs were lost, and"]
    text[-1] += f" {torture['different']} ended with another result."
    rows = memory["megabytes"]
    names = [name for name in rows[0] if name != "round"]
    text += ["", f"| MB of memory after round | {' | '.join(str(row['round']) for row in rows)} |"]
    text += [f"|---|{'---:|' * len(rows)}"]
    text += [f"| {name} | {' | '.join(f'{row[name]:.1f}' for row in rows)} |" for name in names]
    text += ["", "| changed inputs | number | errors | hangs |", "|---|---:|---:|---:|"]
    contents = "packets, HTTP messages, checkpoints, memories, models"
    for title, found in (("command line, files", fuzz), (contents, packets)):
        text += [f"| {title} | {found['inputs']:,} | {found['errors']} | {found['hangs']} |"]
    measured = {"disturbances": torture, "memory": memory, "command line, files": fuzz, "packets": packets}
    text += ["", "| measured | date | cores | machine |", "|---|---|---:|---|"]
    for title, found in measured.items():
        versions = found["versions"]
        machine = f"{versions['processor']}; fedseal {versions['fedseal']}, torch {versions['torch']}"
        text += [f"| {title} | {found['date']} | {found['cores']} | {machine} |"]
    return text
