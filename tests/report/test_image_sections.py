import numpy as np
import pytest

from fedseal.report.image_sections import calibration, confusion


def test_confusion_and_calibration() -> None:
    """Four images of two classes with confidences 0.95, 0.91, 0.65 and 0.85, predicted as 0, 1, 0, 1; their
    labels are 0, 0, 0, 1.

    The bin up to 1 has the first two: one of two correct, mean confidence 0.93, so off by 0.43. The bins up
    to 0.7 and 0.9 have one each, both correct: off by 0.35 and 0.15. The expected error is
    0.5 · 0.43 + 0.25 · (0.35 + 0.15) = 0.34.
    """
    probs = np.array([[0.95, 0.05], [0.09, 0.91], [0.65, 0.35], [0.15, 0.85]])
    labels = np.array([0, 0, 0, 1])
    assert confusion(probs, labels).tolist() == [[2, 1], [0, 1]]
    share, correct, error = calibration(probs, labels)
    assert share.tolist() == [0, 0, 0, 0, 0, 0, 0.25, 0, 0.25, 0.5]
    assert correct[[6, 8, 9]].tolist() == [1, 1, 0.5]
    assert error == pytest.approx(0.34)
