"""The checks that decide whether the server uses a reply."""

import torch

from fedseal.core import Packet
from fedseal.replies import find_problem


def test_problems_that_make_a_reply_unusable() -> None:
    sent = Packet({"model": {"w": torch.zeros(2), "n": torch.tensor(1)}}, {"train": True})

    def reply(**model: torch.Tensor) -> Packet:
        return Packet({"model": model})

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
    for number in (-1, 2**53, 10**400):
        assert "'positive' is not a number" in find_problem(Packet(good, {"positive": number}), sent)
    memory_request = Packet(scalars={"train": False})
    assert find_problem(Packet(), memory_request) == ""
    assert "count named 'event'" in find_problem(Packet(scalars={"event": 7}), memory_request)
