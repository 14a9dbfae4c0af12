from fedseal.reproduce.measure import Measured, gap_recovered, margins_and_gaps, outdated_note


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


def test_outdated_values_are_marked_and_explained() -> None:
    old = Measured({0: 76.0}, 78.62, outdated=True)
    assert old.text() == "76.00* (78.62)"
    assert outdated_note({"FedSEAL": {"a": old}}).startswith("* measured with fedseal 0.1.0")
    assert outdated_note({"FedSEAL": {"a": Measured({0: 76.0})}}) == ""
