import json
from dataclasses import replace
from pathlib import Path

from fedseal.reproduce.cells import find_table
from fedseal.reproduce.measure import (
    Measured,
    gap_recovered,
    margins_and_gaps,
    measure_images,
    on_common_seeds,
    outdated_note,
)
from fedseal.reproduce.store import ResultStore

ROOT = Path(__file__).parents[2]


def test_margin_and_gap_recovered() -> None:
    """Over the common seeds: the margins of seeds 0 and 1 are 76 − 73 = 3 and 78 − 74 = 4, mean 3.5.
    FedAvg-SL has only seed 0: 3 of 83 − 73 = 10 is 30 %. The paper's LeNet at 0.3: 78.62 − 74.95 = 3.67 of
    84.51 − 74.95 = 9.56 is 38 %.
    """
    measured = {
        "Server-SL": {"a": Measured({0: 73.0, 1: 74.0, 2: 10.0}, 74.95)},
        "FedAvg-SL": {"a": Measured({0: 83.0}, 84.51)},
        "FedSEAL": {"a": Measured({0: 76.0, 1: 78.0}, 78.62)},
        "SemiFL": {"a": Measured()},
    }
    assert margins_and_gaps(measured)["FedSEAL"]["a"] == "+3.50 (+3.67), 30% over 1 of 2 seeds (38%)"
    assert margins_and_gaps(measured)["SemiFL"]["a"] == "– (–), – (–)"
    # Seeds 0 and 1 of two: 3 + 4 of (83 − 73) + (78 − 74) is 7 of 14. Without a gap there is no share of it.
    both = Measured({0: 83.0, 1: 78.0})
    assert gap_recovered(measured["FedSEAL"]["a"], measured["Server-SL"]["a"], both) == "50% (–)"
    assert gap_recovered(both, both, both) == "– (–)"
    # A method above FedAvg-SL shows that it is not an upper bound there, for any method.
    measured["SemiFL"] = {"a": Measured({0: 83.1})}
    assert margins_and_gaps(measured)["FedSEAL"]["a"] == "+3.50 (+3.67), – (38%)"
    assert margins_and_gaps(measured)["SemiFL"]["a"] == "+10.10 (–), – (–)"
    assert margins_and_gaps({"FedSEAL": measured["FedSEAL"]}) == {}


def test_a_place_shows_mean_and_standard_deviation() -> None:
    """The standard deviation of 76 and 78 is √2."""
    assert Measured({0: 76.0, 1: 78.0}, 78.62).text() == "77.00 ± 1.41 (78.62)"
    assert Measured({3: 76.0}).text() == "76.00 (–)"
    assert Measured().text() == "not run (–)"


def test_rows_are_compared_over_common_seeds() -> None:
    measured = {
        "fedshift": {"a": Measured({0: 96.0, 1: 94.0}), "b": Measured({0: 92.0, 1: 90.0})},
        "one teacher": {"a": Measured({0: 95.0}), "b": Measured()},
    }
    found = on_common_seeds(measured)
    texts = {row: [place.ours_text() for place in places.values()] for row, places in found.items()}
    assert texts == {"fedshift": ["96.00", "92.00"], "one teacher": ["95.00", "not run"]}


def test_a_table_beyond_the_paper_shows_its_accuracies() -> None:
    """Of the judged model, on the images that it names; another kind of image was not measured."""
    table = replace(find_table("table-fmnist-lenet"), accuracies=("validation", "client"))
    shown = dict(measure_images(table, ResultStore(ROOT / "results"), 1, "paper"))
    summary = json.loads(
        (ROOT / "results/table-fmnist-lenet/server-sl-dir-0.9-seed0/summary.json").read_text()
    )
    expected = f"{100 * summary['validation_accuracy']['mean_last_10']:.2f}"
    assert shown["validation accuracy"]["Server-SL"]["Dir 0.9"] == expected
    assert len(shown) == 2


def test_outdated_values_are_marked_and_explained() -> None:
    old = Measured({0: 76.0}, 78.62, outdated=True)
    assert old.text() == "76.00* (78.62)"
    assert outdated_note({"FedSEAL": {"a": old}}).startswith("* measured with fedseal 0.1.0")
    assert outdated_note({"FedSEAL": {"a": Measured({0: 76.0})}}) == ""
