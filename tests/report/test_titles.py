import pytest

from fedseal.methods.fedseal import FedSEAL
from fedseal.report.titles import accuracy_title, heading, metric_title


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("test_accuracy", "test, wᵗ"),
        ("average_test_accuracy", "test, w̄"),
        ("official_accuracy", "official test set, wᵗ"),
        ("average_validation_accuracy", "validation, w̄"),
        ("new_hospital_accuracy", "new hospital, wᵗ"),
    ],
)
def test_accuracies_are_titled_by_images_and_model(name: str, title: str) -> None:
    assert accuracy_title(name) == title


def test_metrics_are_titled_by_their_method() -> None:
    assert metric_title(FedSEAL(), "positive") == "D⁺"
    assert metric_title(FedSEAL(), "very_new") == "very new"


def test_a_heading_does_not_turn_lambda_into_another_letter() -> None:
    assert heading("thresholds τ") == "Thresholds τ" and heading("λ") == "λ"
