"""The paper's equations, with hand-derived numbers and with properties that hold for any input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fedseal import paper

MODELS = st.integers(1, 12)
IMAGES = st.integers(1, 9)
CLASSES = st.integers(2, 6)
SEEDS = st.integers(0, 2**32)
THETAS = st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.5, 1.0])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits_of(*rows: tuple[float, ...]) -> Tensor:
    """Logits whose softmax gives these rows. Adding 3 to all logits does not change the softmax."""
    return torch.tensor(rows).log() + 3


def confidences(seed: int, *shape: int, sharpness: float = 3.0) -> Tensor:
    """Rows that sum to 1, from nearly uniform to nearly certain."""
    return (torch.randn(shape, generator=seeded(seed)) * sharpness).softmax(dim=-1)


def coarse(seed: int, images: int, classes: int) -> Tensor:
    """Rows of multiples of ¼ that sum to 1, so that ties and values equal to a threshold are common."""
    drawn = torch.randint(classes, (images, 4), generator=seeded(seed))
    return torch.stack([(drawn == m).sum(dim=1) for m in range(classes)], dim=1) / 4


# ------------------------------------------------------------------ the server


def test_eq_1_and_3_server_loss() -> None:
    """Two images of the server, M = 3.

    Image 1: p = (0.7, 0.2, 0.1), y = 1st class: l = −ln 0.7 = 0.356675.
    Image 2: p = (0.25, 0.25, 0.5), y = 3rd class: l = −ln 0.5 = 0.693147.
    L_s = (0.356675 + 0.693147) / 2 = 0.524911.
    """
    loss = paper.server_loss(logits_of((0.7, 0.2, 0.1), (0.25, 0.25, 0.5)), torch.tensor([0, 2]))
    assert float(loss) == pytest.approx(0.524911, abs=1e-6)


VALIDATION = torch.tensor(
    [
        [0.8, 0.1, 0.1, 0.0],  # predicted 0, is 0
        [0.6, 0.3, 0.1, 0.0],  # predicted 0, is 1
        [0.9, 0.0, 0.0, 0.1],  # predicted 0, is 0
        [0.2, 0.7, 0.1, 0.0],  # predicted 1, is 1
        [0.1, 0.3, 0.6, 0.0],  # predicted 2, is 2
    ]
)
VALIDATION_LABELS = torch.tensor([0, 1, 0, 1, 2])


def test_eq_5_thresholds_over_the_true_count() -> None:
    """Eq. 5 as printed, M = 4, the five images above. Class 3 has no image.

    Class 0: numerator 0.8 + 0.6 + 0.9 = 2.3; 2 images are of class 0: τ = 2.3 / 2 = 1.15. It exceeds 1
    because the class is predicted three times but occurs twice.
    Class 1: numerator 0.7; 2 images: τ = 0.35.
    Class 2: numerator 0.6; 1 image: τ = 0.6.
    Class 3: 0 / 0, so τ is the mean of the others: (1.15 + 0.35 + 0.6) / 3 = 0.7.
    """
    tau = paper.thresholds(VALIDATION, VALIDATION_LABELS, "true-count")
    assert_close(tau, torch.tensor([1.15, 0.35, 0.6, 0.7]))


def test_eq_5_thresholds_over_the_predicted_count() -> None:
    """The same images, divided by how often a class is *predicted*: τ is a mean confidence, so at most 1.

    Class 0: 2.3 / 3 = 0.766667. Class 1: 0.7 / 1. Class 2: 0.6 / 1.
    Class 3 is never predicted, so τ is the mean of the others: (0.766667 + 0.7 + 0.6) / 3 = 0.688889.
    """
    tau = paper.thresholds(VALIDATION, VALIDATION_LABELS, "predicted-count")
    assert_close(tau, torch.tensor([0.766667, 0.7, 0.6, 0.688889]), atol=1e-6, rtol=0)


def test_eq_5_a_class_predicted_but_absent_from_validation() -> None:
    """One image with p = (0.2, 0.8): its class is 0, but class 1 is predicted.

    True count: τ_0 = 0 / 1 = 0; τ_1 = 0.8 / 0 is undefined, so it is the mean of the others: 0.
    Predicted count: τ_1 = 0.8 / 1; τ_0 = 0 / 0 is undefined, so it is the mean of the others: 0.8.
    """
    probs, labels = torch.tensor([[0.2, 0.8]]), torch.tensor([0])
    assert paper.thresholds(probs, labels, "true-count").tolist() == [0.0, 0.0]
    assert_close(paper.thresholds(probs, labels, "predicted-count"), torch.tensor([0.8, 0.8]))


@pytest.mark.parametrize("denominator", ["true-count", "predicted-count"])
def test_eq_5_without_validation_images_no_image_is_trusted(denominator: paper.Denominator) -> None:
    """All denominators are 0, and no class has a τ to take the mean of: τ = 1 for all."""
    tau = paper.thresholds(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), denominator)
    assert tau.tolist() == [1.0, 1.0, 1.0]


@given(SEEDS, IMAGES, CLASSES)
def test_eq_5_always_has_a_value(seed: int, images: int, classes: int) -> None:
    """τ is finite, and τ_m · count_m is the numerator for every class m with a count."""
    probs = confidences(seed, images, classes)
    labels = torch.randint(classes, (images,), generator=seeded(seed))
    confidence, predicted = probs.max(dim=1)
    for denominator, counted in (("true-count", labels), ("predicted-count", predicted)):
        tau = paper.thresholds(probs, labels, denominator)
        assert tau.shape == (classes,) and bool(tau.isfinite().all()) and bool((tau >= 0).all())
        for m in set(counted.tolist()):
            numerator = sum(confidence[predicted == m].tolist())
            assert float(tau[m]) * int((counted == m).sum()) == pytest.approx(numerator, abs=1e-5)
    mean_confidence = paper.thresholds(probs, labels, "predicted-count")
    assert float(mean_confidence.max()) <= 1 + 1e-6
    assert float(mean_confidence.min()) >= 1 / classes - 1e-6


# ------------------------------------------------------------------ the ensemble

HISTORY = torch.tensor([[[0.6, 0.4]], [[0.8, 0.2]], [[0.1, 0.9]]])  # three models, one image, M = 2


def test_eq_7_ensemble_mean() -> None:
    """p̄³ = ((0.6, 0.4) + (0.8, 0.2) + (0.1, 0.9)) / 3 = (1.5, 1.5) / 3 = (0.5, 0.5)."""
    assert_close(paper.ensemble_mean(HISTORY), torch.tensor([[0.5, 0.5]]))


def test_eq_8_ensemble_update() -> None:
    """The same three models, one at a time.

    t = 1: 0/1 · p̄⁰ + 1/1 · (0.6, 0.4) = (0.6, 0.4), whatever p̄⁰ is.
    t = 2: 1/2 · (0.6, 0.4) + 1/2 · (0.8, 0.2) = (0.7, 0.3).
    t = 3: 2/3 · (0.7, 0.3) + 1/3 · (0.1, 0.9) = (0.4667 + 0.0333, 0.2 + 0.3) = (0.5, 0.5).
    """
    mean = torch.tensor([[123.0, -7.0]])
    for t, expected in enumerate([[0.6, 0.4], [0.7, 0.3], [0.5, 0.5]], start=1):
        mean = paper.ensemble_update(mean, HISTORY[t - 1], torch.tensor([t]))
        assert_close(mean, torch.tensor([expected]))


def test_eq_8_counts_models_for_each_image() -> None:
    """p̄ = (0.2, 0.8) and p = (0.6, 0.4) for three images that have seen 1, 2 and 4 models, this one included.

    Count 1: p itself, (0.6, 0.4).
    Count 2: (0.2 + 0.6) / 2 = 0.4 and (0.8 + 0.4) / 2 = 0.6.
    Count 4: 3/4 · 0.2 + 1/4 · 0.6 = 0.3 and 3/4 · 0.8 + 1/4 · 0.4 = 0.7.
    """
    mean, probs = torch.tensor([[0.2, 0.8]] * 3), torch.tensor([[0.6, 0.4]] * 3)
    updated = paper.ensemble_update(mean, probs, torch.tensor([1, 2, 4]))
    assert_close(updated, torch.tensor([[0.6, 0.4], [0.4, 0.6], [0.3, 0.7]]))


@given(SEEDS, MODELS, IMAGES, CLASSES)
def test_eq_8_is_eq_7(seed: int, models: int, images: int, classes: int) -> None:
    """The recursion equals the plain mean, and its rows remain probability distributions."""
    history = confidences(seed, models, images, classes)
    mean = torch.zeros(images, classes)
    for t in range(1, models + 1):
        mean = paper.ensemble_update(mean, history[t - 1], torch.full((images,), t))
        assert_close(mean.sum(dim=1), torch.ones(images))
        assert float(mean.min()) >= 0
        assert_close(mean, paper.ensemble_mean(history[:t]), atol=1e-6, rtol=1e-5)


@given(SEEDS, st.integers(2, 8), st.integers(2, 8), CLASSES)
def test_eq_8_with_images_that_came_later(seed: int, models: int, images: int, classes: int) -> None:
    """Image i is added at model `joined[i]`, and its p̄ is the mean over the models from then on."""
    history = confidences(seed, models, images, classes)
    joined = torch.randint(models, (images,), generator=seeded(seed))
    mean, count = torch.zeros(images, classes), torch.zeros(images, dtype=torch.int64)
    for j in range(models):
        present = joined <= j
        count = count + present
        updated = paper.ensemble_update(mean[present], history[j][present], count[present])
        mean = mean.index_put((present,), updated)
    assert count.tolist() == (models - joined).tolist()
    for i, since in enumerate(joined.tolist()):
        assert_close(mean[i], history[since:, i].mean(dim=0), atol=1e-6, rtol=1e-5)


def test_eq_9_pseudo_labels() -> None:
    """The largest of (0.6, 0.3, 0.1) is class 0, of (0.2, 0.5, 0.3) class 1, of (0.3, 0.3, 0.4) class 2."""
    mean = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]])
    assert paper.pseudo_labels(mean).tolist() == [0, 1, 2]


def test_eq_10_positive_set() -> None:
    """τ = (0.6, 0.55, 0.2).

    (0.6, 0.3, 0.1): y⁺ = 0, 0.6 ≥ 0.6: in D⁺, since equality suffices.
    (0.2, 0.5, 0.3): y⁺ = 1, 0.5 < 0.55: not in D⁺, although class 2 with 0.3 reaches its threshold of 0.2.
    (0.3, 0.3, 0.4): y⁺ = 2, 0.4 ≥ 0.2: in D⁺, although 0.4 reaches neither of the other thresholds.
    """
    mean = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]])
    assert paper.positive_set(mean, torch.tensor([0.6, 0.55, 0.2])).tolist() == [True, False, True]


def test_eq_10_a_threshold_above_one_shuts_a_class_out() -> None:
    """Even a confidence of 1 is below τ = 1.15, and τ = 0 admits every image of its class."""
    mean = torch.tensor([[1.0, 0.0], [0.49, 0.51]])
    assert paper.positive_set(mean, torch.tensor([1.15, 0.0])).tolist() == [False, True]


@given(SEEDS, IMAGES, CLASSES)
def test_eq_10_uses_the_threshold_of_the_pseudo_label(seed: int, images: int, classes: int) -> None:
    """D⁺ follows from the label of Eq. 9 and the inequality of Eq. 10, also if two classes tie."""
    mean = coarse(seed, images, classes)
    tau = torch.randint(6, (classes,), generator=seeded(seed)) / 4
    expected = [
        float(row[y]) >= float(tau[y]) and float(row[y]) == max(row.tolist())
        for row, y in zip(mean, paper.pseudo_labels(mean).tolist(), strict=True)
    ]
    assert paper.positive_set(mean, tau).tolist() == expected


# ------------------------------------------------------------------ complementary labels


def test_eq_11_complementary_labels() -> None:
    """θ = 0.1.

    (0.85, 0.1, 0.05): classes 1 and 2 can be drawn; equality with θ suffices.
    (0.4, 0.35, 0.25): no class has p̄ ≤ θ, so the label is −1.
    (0.02, 0.9, 0.08): classes 0 and 2 can be drawn.
    A given class of the two is missing from 50 draws with probability 2⁻⁵⁰.
    """
    mean = torch.tensor([[0.85, 0.1, 0.05], [0.4, 0.35, 0.25], [0.02, 0.9, 0.08]])
    draws = torch.stack([paper.complementary_labels(mean, 0.1, seeded(seed)) for seed in range(50)])
    assert [set(column.tolist()) for column in draws.T] == [{1, 2}, {-1}, {0, 2}]


@given(SEEDS, IMAGES, CLASSES, THETAS)
def test_eq_11_never_exceeds_theta(seed: int, images: int, classes: int, theta: float) -> None:
    """p̄[y⁻] ≤ θ wherever there is a y⁻, and −1 exactly where no class has p̄ ≤ θ."""
    for mean in (confidences(seed, images, classes), coarse(seed, images, classes)):
        labels = paper.complementary_labels(mean, theta, seeded(seed))
        none = [all(p > torch.tensor(theta) for p in row) for row in mean]
        assert (labels == -1).tolist() == none
        for row, label in zip(mean, labels.tolist(), strict=True):
            assert label == -1 or bool(row[label] <= torch.tensor(theta))


def test_eq_11_draws_uniformly() -> None:
    """p̄ = (0.04, 0.5, 0.05, 0.36, 0.05), θ = 0.05: classes 0, 2 and 4 are allowed.

    6,000 images: 2,000 expected for each. χ² = Σ (seen − 2000)² / 2000 has 2 degrees of freedom and stays
    below 13.8 in 99.9 % of all draws; a bias of 10 % towards one class (2200, 1900, 1900) would give 30.
    """
    mean = torch.tensor([[0.04, 0.5, 0.05, 0.36, 0.05]]).expand(6000, -1)
    seen = paper.complementary_labels(mean, 0.05, seeded(1)).bincount(minlength=5)
    assert seen[[1, 3]].tolist() == [0, 0]
    assert float(((seen[[0, 2, 4]] - 2000) ** 2 / 2000).sum()) < 13.8


def test_eq_11_draws_each_image_for_itself() -> None:
    """Two images with the same two allowed classes differ in 500 ± 16 of 1,000 draws; the bounds are 5 σ."""
    mean = torch.tensor([[0.0, 0.0, 1.0]]).expand(2000, -1)
    first, second = paper.complementary_labels(mean, 0.1, seeded(2)).view(2, 1000)
    assert 420 < int((first != second).sum()) < 580


def test_eq_12_negative_set() -> None:
    """τ = (0.8, 0.8, 0.8), θ = 0.1.

    (0.85, 0.1, 0.05): reaches τ, so it is in D⁺ and not in D⁻, although classes 1 and 2 have p̄ ≤ θ.
    (0.6, 0.35, 0.05): below τ, class 2 has 0.05 ≤ 0.1: in D⁻.
    (0.6, 0.3, 0.1): below τ, class 2 has 0.1 ≤ 0.1: in D⁻.
    (0.4, 0.35, 0.25): below τ, but no class has p̄ ≤ θ: in neither set.
    """
    mean = torch.tensor([[0.85, 0.1, 0.05], [0.6, 0.35, 0.05], [0.6, 0.3, 0.1], [0.4, 0.35, 0.25]])
    tau = torch.full((3,), 0.8)
    assert paper.negative_set(mean, tau, 0.1).tolist() == [False, True, True, False]
    assert paper.positive_set(mean, tau).tolist() == [True, False, False, False]


@given(SEEDS, IMAGES, CLASSES, THETAS)
def test_eq_12_is_disjoint_from_eq_10(seed: int, images: int, classes: int, theta: float) -> None:
    """D⁻ contains exactly the images that have a complementary label and are not in D⁺."""
    tau = torch.rand(classes, generator=seeded(seed)) * 1.2
    for mean in (confidences(seed, images, classes), coarse(seed, images, classes)):
        positive, negative = paper.positive_set(mean, tau), paper.negative_set(mean, tau, theta)
        labelled = paper.complementary_labels(mean, theta, seeded(seed)) >= 0
        assert not bool((positive & negative).any())
        assert (positive | negative).tolist() == (positive | labelled).tolist()


# ------------------------------------------------------------------ the client's loss


def test_eq_13_client_loss() -> None:
    """λ = 0.25, L⁺ = 2, L⁻ = 3: L = 0.25 · 2 + 3 = 3.5."""
    assert float(paper.client_loss(0.25, torch.tensor(2.0), torch.tensor(3.0))) == 3.5


def test_eq_14_positive_loss() -> None:
    """p = (0.7, 0.2, 0.1) with y⁺ = 0 and p = (0.25, 0.25, 0.5) with y⁺ = 1.

    L⁺ = (−ln 0.7 − ln 0.25) / 2 = (0.356675 + 1.386294) / 2 = 0.871485.
    """
    loss = paper.positive_loss(logits_of((0.7, 0.2, 0.1), (0.25, 0.25, 0.5)), torch.tensor([0, 1]))
    assert float(loss) == pytest.approx(0.871485, abs=1e-6)


def test_eq_14_with_soft_labels() -> None:
    """The same p against p̄ = (0.5, 0.5, 0) and (0, 0, 1).

    Image 1: −0.5 · ln 0.7 − 0.5 · ln 0.2 = 0.178337 + 0.804719 = 0.983056.
    Image 2: −ln 0.5 = 0.693147.
    L⁺ = (0.983056 + 0.693147) / 2 = 0.838102.
    """
    target = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    loss = paper.positive_loss(logits_of((0.7, 0.2, 0.1), (0.25, 0.25, 0.5)), target)
    assert float(loss) == pytest.approx(0.838102, abs=1e-6)


def test_eq_15_negative_loss() -> None:
    """p = (0.5, 0.3, 0.2) with y⁻ = 2 and p = (0.1, 0.6, 0.3) with y⁻ = 1.

    L⁻ = (−ln(1 − 0.2) − ln(1 − 0.6)) / 2 = (0.223144 + 0.916291) / 2 = 0.569717.
    """
    loss = paper.negative_loss(logits_of((0.5, 0.3, 0.2), (0.1, 0.6, 0.3)), torch.tensor([2, 1]))
    assert float(loss) == pytest.approx(0.569717, abs=1e-6)


def test_eq_15_is_stable_where_the_model_is_certain_and_wrong() -> None:
    """Logits (200, 0, 0) and y⁻ = 0.

    1 − p_0 = (e⁰ + e⁰) / (e²⁰⁰ + 2) ≈ 2 e⁻²⁰⁰ underflows to 0 in float32, but the loss is finite:
    −ln(2 e⁻²⁰⁰) = 200 − ln 2 = 199.306853.
    The gradient is ∂/∂z_0 = p_0 ≈ 1, and ∂/∂z_m = −p_0 · p_m / (1 − p_0) ≈ −1/2 for the two others.
    """
    logits = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    loss = paper.negative_loss(logits, torch.tensor([0]))
    loss.backward()
    assert loss.item() == pytest.approx(200 - math.log(2), abs=1e-4)
    assert logits.grad is not None
    assert_close(logits.grad, torch.tensor([[1.0, -0.5, -0.5]]))


def test_eq_15_has_nothing_left_to_do_where_the_class_is_ruled_out() -> None:
    """Logits (−200, 0, 0) and y⁻ = 0: p_0 ≈ e⁻²⁰⁰, so the loss −ln(1 − 0) and its gradient are 0."""
    logits = torch.tensor([[-200.0, 0.0, 0.0]], requires_grad=True)
    loss = paper.negative_loss(logits, torch.tensor([0]))
    loss.backward()
    assert logits.grad is not None
    assert loss.item() == 0.0 and logits.grad.tolist() == [[0.0, 0.0, 0.0]]


@given(SEEDS, IMAGES, CLASSES)
def test_eq_15_is_the_naive_formula(seed: int, images: int, classes: int) -> None:
    """Value and gradient of −log(1 − p_y) in double precision, at logits where this formula is accurate."""
    random = seeded(seed)
    logits = torch.randn(images, classes, generator=random, dtype=torch.float64)
    logits = logits.mul(3).clamp(-6, 6).requires_grad_()
    labels = torch.randint(classes, (images,), generator=random)
    naive = -(1 - logits.softmax(dim=1)[torch.arange(images), labels]).log().mean()
    loss = paper.negative_loss(logits, labels)
    assert_close(loss, naive, atol=1e-9, rtol=1e-7)
    (gradient,) = torch.autograd.grad(loss, logits)
    (expected,) = torch.autograd.grad(naive, logits)
    assert_close(gradient, expected, atol=1e-9, rtol=1e-6)


def test_empty_sets_have_zero_loss_and_gradient() -> None:
    """L⁺ or L⁻ of no images is exactly 0, and backward() works."""
    none = torch.zeros(0, dtype=torch.int64)
    logits = torch.randn(4, 3, generator=seeded(0)).requires_grad_()
    for loss in (
        paper.positive_loss(logits[:0], none),
        paper.positive_loss(logits[:0], torch.zeros(0, 3)),
        paper.negative_loss(logits[4:], none),
        paper.client_loss(0.25, paper.positive_loss(logits[:0], none), paper.negative_loss(logits[4:], none)),
    ):
        assert loss.item() == 0.0
        logits.grad = None
        loss.backward()
        assert logits.grad is not None and logits.grad.tolist() == [[0.0] * 3] * 4


def test_empty_set_does_not_affect_the_other_loss() -> None:
    """If D⁺ is empty, L = L⁻; if D⁻ is empty, L = λ L⁺. The same holds for the gradients."""
    none, y = torch.zeros(0, dtype=torch.int64), torch.tensor([0, 2])
    logits = torch.randn(2, 3, generator=seeded(0)).requires_grad_()
    plus, minus = paper.positive_loss(logits, y), paper.negative_loss(logits, y)
    no_plus = paper.client_loss(0.3, paper.positive_loss(logits[:0], none), minus)
    no_minus = paper.client_loss(0.3, plus, paper.negative_loss(logits[2:], none))
    for loss, expected in ((no_plus, minus), (no_minus, 0.3 * plus)):
        assert loss.item() == expected.item() > 0
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert torch.equal(gradient, torch.autograd.grad(expected, logits, retain_graph=True)[0])


# ------------------------------------------------------------------ λ

EVERY_SCHEDULE: list[paper.Schedule] = ["approach-one", "divide", "divide-capped", "multiply", "constant"]


@pytest.mark.parametrize(
    ("schedule", "first", "second", "last"),
    [
        ("approach-one", 0.2875, 0.323125, 0.9955596),
        ("divide", 0.2631579, 0.2770083, 42.22596),
        ("divide-capped", 0.2631579, 0.2770083, 1.0),
        ("multiply", 0.2375, 0.225625, 0.001480132),
        ("constant", 0.25, 0.25, 0.25),
    ],
)
def test_lambda_schedules(schedule: paper.Schedule, first: float, second: float, last: float) -> None:
    """λ0 = 0.25, rate 0.95 until round 100: 0.95¹ = 0.95, 0.95² = 0.9025, 0.95¹⁰⁰ = 0.005920529.

    approach-one: 1 − 0.75 · 0.95 = 0.2875, 1 − 0.75 · 0.9025 = 0.323125, 1 − 0.75 · 0.005920529 = 0.9955596.
    divide: 0.25 / 0.95 = 0.2631579, 0.25 / 0.9025 = 0.2770083, 0.25 / 0.005920529 = 42.22596.
    divide-capped: the same, but at most 1.
    multiply: 0.25 · 0.95 = 0.2375, 0.25 · 0.9025 = 0.225625, 0.25 · 0.005920529 = 0.001480132.
    """
    seen = [paper.positive_weight(schedule, 0.25, t) for t in (1, 2, 100)]
    assert seen == pytest.approx([first, second, last], rel=1e-6)
    assert paper.positive_weight(schedule, 0.25, 101) == paper.positive_weight(schedule, 0.25, 100)


def test_lambda_divide_capped_reaches_one_in_round_28() -> None:
    """0.25 / 0.95^t ≥ 1 for t ≥ ln 4 / −ln 0.95 = 1.386294 / 0.0512933 = 27.03."""
    before, after = (paper.positive_weight("divide-capped", 0.25, t) for t in (27, 28))
    assert 0.99 < before < 1.0 and after == 1.0


@given(
    st.sampled_from(EVERY_SCHEDULE),
    st.floats(0, 1),
    st.integers(1, 300),
    st.floats(0.5, 1),
    st.integers(0, 150),
)
def test_lambda_stays_in_bounds_and_goes_one_way(
    schedule: paper.Schedule, start: float, t: int, rate: float, until: int
) -> None:
    now, then = (paper.positive_weight(schedule, start, number, rate, until) for number in (t, t + 1))
    if t >= until:
        assert now == then
    if schedule == "multiply":
        assert 0 <= then <= now + 1e-12 and now <= start
    elif schedule == "constant":
        assert now == then == start
    else:
        assert start - 1e-12 <= now <= then + 1e-12
        assert schedule == "divide" or then <= 1
