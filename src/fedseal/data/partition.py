"""How many images of each class every client gets, and dealing them out; pure functions on labels.

Counts are an array [clients, classes] whose rows sum to exactly the images per client and whose columns never
exceed what is available. All randomness comes from the generator passed in.
"""

import numpy as np
import numpy.typing as npt

from fedseal.data.pool import Ints
from fedseal.errors import UserError

Floats = npt.NDArray[np.float64]

FEDMATCH_CLASSES = 10


def iid_counts(clients: int, each: int, available: Ints) -> Ints:
    """The same class counts for all clients, up to 1: equal classes, or the pool's mix if one falls short."""
    _require(clients, each, available)
    totals = apportion(np.ones(len(available)), clients * each)
    if (totals > available).any():
        totals = apportion(available, clients * each, available)
    return _spread(totals, clients)


def dirichlet_counts(
    clients: int, each: int, alpha: float, available: Ints, rng: np.random.Generator
) -> Ints:
    """Client k draws its class mix p_k ~ Dir(alpha): the smaller alpha, the fewer classes it sees."""
    # Gamma(a) = Gamma(a + 1) U^(1/a), in logarithms: for a small a all gammas of a row can underflow to 0
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
    """Counts that follow the mix of each client (a row) as far as the classes last.

    Clients are served one after the other, so the last ones find the scarce classes gone and get what is
    left: where a pool is used up completely, their mixes are not the ones asked for. The order is random, so
    that this does not always hit the same clients.
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

    Fractions are settled for all clients of a type together, then within the type, so that a pool that fits
    exactly is used up exactly. If a class cannot supply its share, every type gives up some of it.
    """
    if len(available) != FEDMATCH_CLASSES:
        raise UserError(
            f'data.partition = "fedmatch" needs exactly {FEDMATCH_CLASSES} classes, but there are'
            f' {len(available)}: use "iid" or "dirichlet".'
        )
    _require(clients, each, available)
    members = [len(range(kind, clients, FEDMATCH_CLASSES)) for kind in range(min(clients, FEDMATCH_CLASSES))]
    rows = np.array(members, np.int64) * each
    totals = _round(_fit(fedmatch_mixes()[: len(rows)], rows, available), rows, available)
    counts = np.empty((clients, FEDMATCH_CLASSES), np.int64)
    for kind, size in enumerate(members):
        counts[kind::FEDMATCH_CLASSES] = _spread(totals[kind], size)
    return counts


def fedmatch_mixes() -> Floats:
    """Row t: the class probabilities of a client of type t; rows and columns sum to 1."""
    first = np.array([0.50, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03, 0.15])
    return np.stack([np.roll(first, kind) for kind in range(FEDMATCH_CLASSES)])


def mix(counts: Ints) -> Floats:
    """The class mix that each client really got; `mix_counts` turns it into counts of a test set."""
    return np.asarray(counts / counts.sum(axis=1, keepdims=True), np.float64)


def deal(labels: Ints, candidates: Ints, counts: Ints, rng: np.random.Generator) -> tuple[Ints, ...]:
    """Sorted indices for each client: of every class, random candidates, none of them twice."""
    hands: list[list[Ints]] = [[] for _ in counts]
    for images, wanted in zip(by_class(labels, candidates, counts.shape[1], rng), counts.T, strict=True):
        ends = np.cumsum(wanted)
        if ends[-1] > len(images):
            raise ValueError(f"counts ask for {ends[-1]} images of a class that has {len(images)}")
        for hand, cards in zip(hands, np.split(images, ends)[:-1], strict=True):
            hand.append(cards)
    return tuple(np.sort(np.concatenate(hand)) for hand in hands)


def by_class(labels: Ints, candidates: Ints, classes: int, rng: np.random.Generator) -> list[Ints]:
    """The candidates of each class in random order; those without a label are left out."""
    return [shuffle(candidates[labels[candidates] == label], rng) for label in range(classes)]


def shuffle(items: Ints, rng: np.random.Generator) -> Ints:
    """A random order, from raw bits: numpy may change `permutation` with a version, but never these."""
    return items[np.argsort(rng.bit_generator.random_raw(len(items)), kind="stable")]


def apportion(weights: Floats | Ints, total: int, limits: Ints | None = None) -> Ints:
    """`total` items by largest remainders; beyond a class's limit they go to the others by weight.

    Where no class with a weight has room, they go to what room there is, in proportion to it.
    """
    counts = np.zeros(len(weights), np.int64)
    if limits is None:
        limits = np.full(len(weights), total)
    if limits.sum() < total:
        raise ValueError(f"{total} items do not fit into limits of {limits.sum()}")
    while short := total - int(counts.sum()):  # every pass but the last fills up a class
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
    """Class totals over clients: counts differ by at most 1 in a class, and rows are equal if they can be."""
    even, extra = np.divmod(totals, clients)
    counts = np.tile(even, (clients, 1))
    # fewer extras of a class than clients, dealt in turn: nobody gets two of the same class
    classes = np.repeat(np.arange(len(totals)), extra)
    counts[np.arange(len(classes)) % clients, classes] += 1
    return counts


def _fit(mixes: Floats, rows: Ints, limits: Ints) -> Floats:
    """Real-valued counts with these row sums, columns within the limits, else in proportion to the mixes."""
    ideal = mixes * rows[:, None]
    for _ in range(1000):  # iterative proportional fitting; what it leaves over a limit is cut in rounding
        totals = ideal.sum(axis=0)
        if (totals <= limits + 1e-6).all():
            break
        ideal = ideal * np.minimum(1, limits / np.maximum(totals, 1e-9))
        ideal *= (rows / ideal.sum(axis=1))[:, None]
    return ideal


def _round(ideal: Floats, rows: Ints, limits: Ints) -> Ints:
    """Whole numbers near the ideal, with these row sums and no column beyond its limit."""
    counts = np.stack([apportion(row, int(total), limits) for row, total in zip(ideal, rows, strict=True)])
    while (over := counts.sum(axis=0) > limits).any():  # move one image of one row to a class with room
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
