"""Clients' replies: which ones the server uses, and what it adds up from them."""

import re
from collections import Counter
from collections.abc import Collection, Mapping

import torch

from fedseal import weights
from fedseal.aggregate import Aggregation
from fedseal.core import Method, Packet, Problem, Reply

MAX_COUNTS = 20
MAX_COUNT = 2**32
MAX_GROWTH = 1000  # of the largest weight in one round; beyond it a client has diverged
MAX_BATCHES = 10**9  # in one round
# Names in a round's event that belong to the server.
RESERVED = {"event", "t", "bytes_down", "bytes_up", "epsilon", "left_out", "seconds"}


def is_reserved(name: str) -> bool:
    """True for names that a method's own numbers must not have."""
    return name in RESERVED or name.endswith(("accuracy", "_correct"))


def is_count_name(name: str) -> bool:
    """True for names that a client's counts may have."""
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,39}", name) is not None


def check_reply(reply: Packet, request: Packet, method: Method) -> Problem | None:
    """The reason to leave a client out of a round. Nothing that a client sends raises an exception here."""
    try:
        why = find_problem(reply, request, method.uploads, method.also_uploads)
    except Exception as error:
        why = f"its reply cannot be checked ({type(error).__name__})"
    return Problem(why) if why else None


def find_problem(
    reply: Packet, request: Packet, uploads: str = "model", also_uploads: Collection[str] = ()
) -> str:
    """Why a client's reply cannot be used; empty if it can."""
    counts = reply.counts
    if len(counts) > MAX_COUNTS:
        return f"its reply contains {len(counts)} counts, more than {MAX_COUNTS}"
    for name, value in counts.items():
        if not is_count_name(name):
            return "its reply contains a count with an invalid name (up to 40 letters, digits and '_')"
        if is_reserved(name):
            return f"its reply contains a count named '{name}', which is reserved for the server"
        if not 0 <= value < MAX_COUNT:
            return f"its count '{name}' is not a number of images"
    expected = (uploads, *also_uploads) if request.trains else ()
    if request.trains and uploads not in reply.tensors:
        return "its reply contains no model"
    if reply.tensors.keys() != set(expected):
        return f"its reply contains other groups of tensors than {', '.join(expected) or 'none'}"
    if not all(weights.same_layout(reply.tensors[name], request.tensors[name]) for name in expected):
        return "its model has other names, shapes or types than the one it was sent"
    if not expected:
        return ""
    received, sent = reply.tensors[uploads], request.tensors[uploads]
    if not all(weights.all_finite(group) for group in reply.tensors.values()):
        return "its model has NaN or infinite weights (is client.lr too high?)"
    if any(name in sent and not torch.equal(received[name], sent[name]) for name in weights.NORMALISATION):
        return "its model normalises images differently from the one it was sent"
    if any(bool((value < 0).any()) for name, value in received.items() if name.endswith("running_var")):
        return "its model has negative variances"
    if name := changed_integers(received, sent):
        return f"its model has other integers in '{name}' than the one it was sent"
    if weights.largest_weight(received) > MAX_GROWTH * (1 + weights.largest_weight(sent)):
        return f"its weights grew more than {MAX_GROWTH}-fold in one round (is client.lr too high?)"
    if weights.largest_statistic(received) > MAX_GROWTH**2 * (1 + weights.largest_statistic(sent)):
        return f"its BatchNorm statistics grew more than {MAX_GROWTH**2:,}-fold in one round"
    return ""


def changed_integers(received: weights.Tensors, sent: weights.Tensors) -> str:
    """The first tensor of integers that a client must not have changed; empty if there is none.

    BatchNorm counts batches. Other integers, such as indices, are part of the network.
    """
    for name, before in sent.items():
        now = received[name]
        if before.is_floating_point() or torch.equal(now, before):
            continue
        grew = (now >= before) & (now <= before + MAX_BATCHES)
        if not weights.is_batch_count(name) or not bool(grew.all()):
            return name
    return ""


def released(
    packets: Mapping[int, Packet], requests: Mapping[int, Packet], aggregation: Aggregation, uploads: str
) -> Mapping[int, Packet]:
    """The replies as the method sees them: the aggregation decides what it releases of the uploads."""
    sent = {k: request.tensors[uploads] for k, request in requests.items() if request.trains}
    received = {k: packets[k].tensors[uploads] for k in sent if k in packets}
    shown = aggregation.release(received, sent)
    if shown is received:
        return packets
    groups = {k: {uploads: values} for k, values in shown.items()}
    return {k: Packet(groups.get(k, {}), {"t": request.scalars["t"]}) for k, request in requests.items()}


def traffic(replies: Collection[Reply]) -> dict[str, int]:
    """Bytes sent to the clients and received from them."""
    return {"bytes_down": sum(r.down for r in replies), "bytes_up": sum(r.up for r in replies)}


def total_counts(replies: Collection[Reply]) -> dict[str, int]:
    """The clients' counts, added up; none if a client keeps its counts to itself."""
    if any(reply.packet.scalars.get("counts") is False for reply in replies):
        return {}
    total: Counter[str] = Counter()
    for reply in replies:
        total.update(reply.packet.counts)
    return dict(total)


def correct_rates(replies: Collection[Reply]) -> dict[str, float]:
    """Shares of correct labels, in a simulation that knows the true ones."""
    total: Counter[str] = Counter()
    for reply in replies:
        total.update(reply.label_counts)
    names = [name.removesuffix("_known") for name in total if name.endswith("_known") and total[name]]
    return {f"{name}_correct": total[f"{name}_right"] / total[f"{name}_known"] for name in names}
