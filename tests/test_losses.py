"""Losses of the compared methods, with hand-derived numbers."""

from math import log

import pytest
import torch

from fedseal.losses import fixmatch_loss, uda_loss


def test_fixmatch_loss() -> None:
    """Two images, two classes, threshold 0.8.

    Image 1: the weak logits (ln 9, 0) give confidences (0.9, 0.1), so the label is 0. The strong logits
    (0, ln 3) give (¼, ¾), so the cross-entropy is −ln ¼ = ln 4. Image 2: the weak logits (0, 0) give (½, ½),
    which is below the threshold, so the loss is 0. Mean over both: (ln 4)/2 = ln 2.
    """
    weak = torch.tensor([[log(9), 0.0], [0.0, 0.0]])
    strong = torch.tensor([[0.0, log(3)], [5.0, 0.0]])
    assert float(fixmatch_loss(weak, strong, 0.8)) == pytest.approx(log(2))
    assert float(fixmatch_loss(weak, strong, 0.95)) == 0.0


def test_uda_loss() -> None:
    """Two images, two classes, threshold 0.7, temperature ½.

    Image 1: the weak logits (ln 3, 0) give (¾, ¼), which is above the threshold. Divided by ½, they are
    (2 ln 3, 0) = (ln 9, 0), which gives (0.9, 0.1). The strong logits (0, 0) give (½, ½), so
    KL = 0.9 ln(0.9/0.5) + 0.1 ln(0.1/0.5) = 0.529008 − 0.160944 = 0.368064. Image 2 has (½, ½), so its loss
    is 0. Mean over both: 0.184032.
    """
    weak = torch.tensor([[log(3), 0.0], [0.0, 0.0]])
    strong = torch.tensor([[0.0, 0.0], [5.0, 0.0]])
    assert float(uda_loss(weak, strong, 0.7, 0.5)) == pytest.approx(0.184032, abs=1e-6)


def test_uda_masks_by_the_confidence_before_sharpening() -> None:
    """(¾, ¼) is sharpened to (0.9, 0.1), but the threshold of 0.8 is compared with ¾."""
    weak, strong = torch.tensor([[log(3), 0.0]]), torch.tensor([[0.0, 0.0]])
    assert float(uda_loss(weak, strong, 0.8, 0.5)) == 0.0


def test_uda_loss_of_equal_views_at_temperature_one_is_zero() -> None:
    logits = torch.tensor([[3.0, 0.0, -1.0], [0.5, 4.0, 0.0]])
    assert float(uda_loss(logits, logits, 0.5, 1.0)) == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize(
    "loss", [lambda w, s: fixmatch_loss(w, s, 0.5), lambda w, s: uda_loss(w, s, 0.5, 0.4)]
)
def test_loss_and_gradient_are_finite_for_a_confident_wrong_strong_view(loss: object) -> None:
    weak = torch.tensor([[20.0, 0.0]])
    strong = torch.tensor([[-200.0, 200.0]], requires_grad=True)
    value = loss(weak, strong)  # type: ignore[operator]
    value.backward()
    assert value.item() == pytest.approx(400.0, abs=0.01)
    assert strong.grad is not None
    torch.testing.assert_close(strong.grad, torch.tensor([[-1.0, 1.0]]), atol=1e-6, rtol=0)
