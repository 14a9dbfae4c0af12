"""How many images of each class every client gets, and which: pure functions of the labels.

Counts are arrays [clients, classes]. Each row sums to the images per client, and no column exceeds the images
available. All randomness comes from the generator passed in.
"""

import numpy as np
import numpy.typing as npt

from fedseal.data.pool import Ints
from fedseal.errors import UserError

Floats = npt.NDArray[np.float64]

FEDMATCH_CLASSES = 10


def iid_counts(clients: int, each: int, available: Ints) -> Ints:
    """The same counts for all clients, up to 1: equal classes or, if a class is too small, the pool's mix."""
    _require(clients, each, available)
    totals = apportion(np.ones(len(available)), clients * each)
    if (totals > available).any():
        totals = apportion(available, clients * each, available)
    return _spread(totals, clients)


def dirichlet_counts(
    clients: int, each: int, alpha: float, available: Ints, rng: np.random.Generator
) -> Ints:
    """Client k draws its class mix p_k ~ Dir(alpha): the smaller alpha, the fewer classes it has."""
    _require(clients, each, available)
    # Gamma(a) = Gamma(a + 1) U^(1/a), in logarithms: for small a, all gammas of a row could underflow to 0.
    shape = (clients, len(available))
    logs = np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha
    gammas = np.exp(logs - logs.max(axis=1, keepdims=True))
    return mix_counts(gammas / gammas.sum(axis=1, keepdims=True), each, available, rng)


def mix_counts(
    mixes: Floats,
    each: int,
    available: Ints,
    rng: np.random.Generator,
    key: str = "data.images_per_client",
) -> Ints:
    """Counts that follow the class mix of each client (a row) as long as images of the class are left.

    Clients are served in random order. If a class runs out, the later clients get other classes instead, so
    their mixes differ from the requested ones.
    """
    _require(len(mixes), each, available, key)
    counts = np.zeros((len(mixes), len(available)), np.int64)
    left = available.copy()
    for client in shuffle(np.arange(len(mixes)), rng):
        counts[client] = apportion(mixes[client], each, left)
        left -= counts[client]
    return counts


def fedmatch_counts(clients: int, each: int, available: Ints) -> Ints:
    """FedMatch's mix: client k has half of its images from class k mod 10, 15 % from each neighbouring class.

    The counts are rounded for all clients of a type together, then divided within the type, so that a pool of
    exactly the right size is used up. If a class is too small, every type gets less of it.
    """
    if len(available) != FEDMATCH_CLASSES:
        raise UserError(
            f'data.partition = "fedmatch" needs exactly {FEDMATCH_CLASSES} classes, but there are'
            f' {len(available)}: use "iid" or "dirichlet".'
        )
    _require(clients, each, available)
    members = [len(range(kind, clients, FEDMATCH_CLASSES)) for kind in range(min(clients, FEDMATCH_CLASSES))]
    rows = np.array(members, np.int64) * each
    totals = _round_counts(_fit(fedmatch_mixes()[: len(rows)], rows, available), rows, available)
    counts = np.empty((clients, FEDMATCH_CLASSES), np.int64)
    for kind, size in enumerate(members):
        counts[kind::FEDMATCH_CLASSES] = _spread(totals[kind], size)
    return counts


def fedmatch_mixes() -> Floats:
    """Row t: the class probabilities of a client of type t; rows and columns sum to 1."""
    first = np.array([0.50, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03, 0.15])
    return np.stack([np.roll(first, kind) for kind in range(FEDMATCH_CLASSES)])


def class_mixes(counts: Ints) -> Floats:
    """The class mix of each client; `mix_counts` turns it into the counts of a test set."""
    return np.asarray(counts / counts.sum(axis=1, keepdims=True), np.float64)


def assign_images(labels: Ints, candidates: Ints, counts: Ints, rng: np.random.Generator) -> tuple[Ints, ...]:
    """Sorted indices for each client: random candidates of each class, each used at most once."""
    clients: list[list[Ints]] = [[] for _ in counts]
    shuffled = shuffle_by_class(labels, candidates, counts.shape[1], rng)
    for images, wanted in zip(shuffled, counts.T, strict=True):
        ends = np.cumsum(wanted)
        if ends[-1] > len(images):
            raise ValueError(f"counts ask for {ends[-1]} images of a class that has {len(images)}")
        for assigned, share in zip(clients, np.split(images, ends)[:-1], strict=True):
            assigned.append(share)
    return tuple(np.sort(np.concatenate(assigned)) for assigned in clients)


def shuffle_by_class(labels: Ints, candidates: Ints, classes: int, rng: np.random.Generator) -> list[Ints]:
    """The candidates of each class in random order, without those that have no label."""
    return [shuffle(candidates[labels[candidates] == label], rng) for label in range(classes)]


def shuffle(items: Ints, rng: np.random.Generator) -> Ints:
    """A random order from raw bits, which no NumPy version changes; `permutation` has no such guarantee."""
    return items[np.argsort(rng.bit_generator.random_raw(len(items)), kind="stable")]


def apportion(weights: Floats | Ints, total: int, limits: Ints | None = None) -> Ints:
    """Divides `total` items among the classes in proportion to the weights, by the largest remainder method.

    Items beyond the limit of a class go to the other classes by weight. When all classes with a weight are
    full, items go to the remaining classes in proportion to their free places.
    """
    counts = np.zeros(len(weights), np.int64)
    if limits is None:
        limits = np.full(len(weights), total)
    if limits.sum() < total:
        raise ValueError(f"{total} items do not fit into limits of {limits.sum()}")
    while short := total - int(counts.sum()):  # every pass except the last fills a class
        room = limits - counts
        wanted = np.where(room > 0, weights, 0).astype(np.float64)
        if wanted.sum() == 0:
            wanted = room.astype(np.float64)
        shares = wanted / wanted.sum() * short
        whole = np.floor(shares).astype(np.int64)
        by_remainder = np.argsort(whole - shares, kind="stable")
        whole[by_remainder[: short - whole.sum()]] += 1
        counts += np.minimum(whole, room)
    return counts


def _spread(totals: Ints, clients: int) -> Ints:
    """Divides class totals among clients: counts of a class differ by at most 1, and so do the row sums."""
    even, extra = np.divmod(totals, clients)
    counts = np.tile(even, (clients, 1))
    # A class has fewer extras than there are clients, so no client gets two of the same class.
    classes = np.repeat(np.arange(len(totals)), extra)
    counts[np.arange(len(classes)) % clients, classes] += 1
    return counts


def _fit(mixes: Floats, rows: Ints, limits: Ints) -> Floats:
    """Real-valued counts with the given row sums, in proportion to the mixes as far as the limits allow."""
    ideal = mixes * rows[:, None]
    for _ in range(1000):  # iterative proportional fitting; rounding removes a remaining excess
        totals = ideal.sum(axis=0)
        if (totals <= limits + 1e-6).all():
            break
        ideal = ideal * np.minimum(1, limits / np.maximum(totals, 1e-9))
        ideal *= (rows / ideal.sum(axis=1))[:, None]
    return ideal


def _round_counts(ideal: Floats, rows: Ints, limits: Ints) -> Ints:
    """Whole numbers close to the ideal ones, with the given row sums and columns within the limits."""
    counts = np.stack([apportion(row, int(total), limits) for row, total in zip(ideal, rows, strict=True)])
    while (over := counts.sum(axis=0) > limits).any():  # move one image of a row to another class
        column = int(np.argmax(over))
        excess = counts - ideal
        gain = np.where(counts[:, [column]] > 0, excess[:, [column]] - excess, -np.inf)
        gain[:, counts.sum(axis=0) >= limits] = -np.inf
        row, other = np.unravel_index(np.argmax(gain), gain.shape)
        counts[row, column] -= 1
        counts[row, other] += 1
    return counts


def _require(clients: int, each: int, available: Ints, key: str = "data.images_per_client") -> None:
    if clients * each > available.sum():
        raise UserError(
            f"{clients} clients with {each} images each need {clients * each} images, but only"
            f" {available.sum()} are available: lower data.clients or {key}."
        )
