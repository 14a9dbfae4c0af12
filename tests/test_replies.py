"""The checks that decide whether the server uses a reply."""

import torch

from fedseal.core import Packet
from fedseal.methods.fedseal import FedSEAL
from fedseal.replies import check_reply, find_problem


def test_problems_that_make_a_reply_unusable() -> None:
    sent = Packet({"model": {"w": torch.zeros(2), "num_batches_tracked": torch.tensor(1)}}, {"train": True})

    def reply(w: torch.Tensor, n: torch.Tensor | None = None) -> Packet:
        return Packet({"model": {"w": w} | ({} if n is None else {"num_batches_tracked": n})})

    assert find_problem(reply(w=torch.ones(2), n=torch.tensor(5)), sent) == ""
    assert "NaN" in find_problem(reply(w=torch.tensor([1.0, float("nan")]), n=torch.tensor(5)), sent)
    assert "infinite" in find_problem(reply(w=torch.tensor([1.0, float("inf")]), n=torch.tensor(5)), sent)
    assert "shapes" in find_problem(reply(w=torch.ones(3), n=torch.tensor(5)), sent)
    assert "types" in find_problem(reply(w=torch.ones(2).double(), n=torch.tensor(5)), sent)
    assert "names" in find_problem(reply(w=torch.ones(2)), sent)
    assert "no model" in find_problem(Packet(), sent)
    good = reply(w=torch.ones(2), n=torch.tensor(5)).tensors
    assert find_problem(Packet(good, {"t": 1, "positive": 5, "share": 0.5}), sent) == ""
    for name in ("test_accuracy", "positive_correct", "event", "bytes_up"):
        assert f"count named '{name}'" in find_problem(Packet(good, {"t": 1, name: 1}), sent)
    for number in (-1, 2**32, 10**400):
        assert "'positive' is not a number" in find_problem(Packet(good, {"positive": number}), sent)
    memory_request = Packet(scalars={"train": False})
    assert find_problem(Packet(), memory_request) == ""
    assert "count named 'event'" in find_problem(Packet(scalars={"event": 7}), memory_request)


def test_batch_norm_statistics_cannot_explode() -> None:
    """Variances grow with the square of weights: the limit is 1000² · (1 + 3)."""
    sent = Packet({"model": {"norm.running_var": torch.tensor([3.0, 1.0])}}, {"train": True})

    def problem(value: float) -> str:
        return find_problem(Packet({"model": {"norm.running_var": torch.tensor([1.0, value])}}), sent)

    assert problem(3.9e6) == ""
    assert (
        problem(4.1e6)
        == problem(3e38)
        == "its BatchNorm statistics grew more than 1,000,000-fold in one round"
    )


def test_integers_of_a_network_stay_as_they_are() -> None:
    """A wrong index could end the run. Only BatchNorm's counts of batches grow, and not without limit."""
    model = {
        "index": torch.tensor([0, 1]),
        "norm.num_batches_tracked": torch.tensor(7),
        "mask": torch.tensor(True),
    }
    sent = Packet({"model": model})
    assert find_problem(Packet({"model": model | {"norm.num_batches_tracked": torch.tensor(9)}}), sent) == ""
    for name, value in {
        "index": torch.tensor([0, 10**6]),
        "mask": torch.tensor(False),
        "norm.num_batches_tracked": torch.tensor(6),
    }.items():
        assert f"'{name}'" in find_problem(Packet({"model": model | {name: value}}), sent)
    endless = Packet({"model": model | {"norm.num_batches_tracked": torch.tensor(2**63 - 1)}})
    assert "num_batches_tracked" in find_problem(endless, sent)


def test_weights_are_compared_with_weights_and_not_with_the_normalisation() -> None:
    """The largest weight is 0.5, so a reply may have up to 1,500. The pixels' deviation is 90."""
    sent = Packet({"model": {"std": torch.tensor([90.0]), "w": torch.tensor([0.5])}})
    assert find_problem(Packet({"model": sent.tensors["model"] | {"w": torch.tensor([1499.0])}}), sent) == ""
    grown = Packet({"model": sent.tensors["model"] | {"w": torch.tensor([1501.0])}})
    assert "1000-fold" in find_problem(grown, sent)


def test_a_reply_has_exactly_the_groups_that_the_method_names() -> None:
    group = {"w": torch.zeros(2)}
    sent = Packet({"model": group, "control": group, "thresholds": group})
    strange = {"x": torch.zeros(1).to(torch.float8_e4m3fn)}  # PyTorch cannot tell whether this is finite
    assert "other groups of tensors than model" in find_problem(Packet({"model": group, "x": strange}), sent)
    assert "other groups" in find_problem(Packet({"model": group, "thresholds": group}), sent)
    both = Packet({"model": group, "control": group})
    assert find_problem(both, sent, "model", ["control"]) == ""
    assert "other groups of tensors than model, control" in find_problem(
        Packet({"model": group}), sent, "model", ["control"]
    )
    changed = Packet({"model": group, "control": strange})
    assert "other names, shapes or types" in find_problem(changed, sent, "model", ["control"])
    listens = Packet(sent.tensors, {"train": False})
    assert "other groups of tensors than none" in find_problem(Packet({"model": group}), listens)


def test_an_exception_in_a_check_is_its_clients_problem() -> None:
    strange = {"w": torch.zeros(1).to(torch.float8_e4m3fn)}
    problem = check_reply(Packet({"model": strange}), Packet({"model": strange}), FedSEAL())
    assert problem is not None and "its reply cannot be checked (" in problem.reason
