"""Tables of the ratios that `make bench` measures, one for each section of docs/benchmarks.md."""

from bench.page import Found, grid, measured_on


def reached(ratio: float, target: str) -> bool:
    """True if a ratio meets a target such as "<= 1.3"."""
    sign, bound = target.split()
    return ratio >= float(bound) if sign == ">=" else ratio <= float(bound)


def _table(found: Found, *parts: str) -> list[str]:
    rows = [
        [
            row["what"],
            f"{row['ratio']:.2f}",
            row["target"],
            "" if reached(row["ratio"], row["target"]) else "missed",
        ]
        for row in found["ratios"]
        if row["part"] in parts
    ]
    return [*grid(["what", "measured", "target", ""], rows), "", measured_on(found)]


def limit_table(found: Found) -> list[str]:
    """The round beside plain PyTorch, and what makes it fast."""
    return _table(found, "round", "predict", "arithmetic")


def start_table(found: Found) -> list[str]:
    return _table(found, "startup")


def augmentation_table(found: Found) -> list[str]:
    return _table(found, "augment")


def scale_table(found: Found) -> list[str]:
    """Many clients, and many images."""
    return _table(found, "fleet", "folders")
