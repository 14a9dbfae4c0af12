"""FedRGD: averaging in groups with hand-derived numbers, and who trains from what."""

from typing import Any

import torch

from conftest import TINY
from fedseal.config.load import load_config
from fedseal.core import Packet, Round
from fedseal.data.federation import load_federation
from fedseal.learn import train_supervised
from fedseal.methods.fedrgd import FedRGD, grouped_mean
from fedseal.run_setup import RunSetup


def model(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([float(value)])}


def make(**changes: Any) -> tuple[RunSetup, FedRGD]:
    config = load_config("fmnist-lenet", {**TINY, "method": "fedrgd", **changes})
    method = config.selected_method()
    assert isinstance(method, FedRGD)
    return RunSetup(config, load_federation(config.data, config.seed)), method


def test_groups_are_averaged_with_the_server_and_then_together() -> None:
    """Server 12; groups {0: 0, 1: 3} and {2: 6}: (12 + 0 + 3)/3 = 5 and (12 + 6)/2 = 9, together 7."""
    models = {0: model(0), 1: model(3), 2: model(6)}
    assert grouped_mean(model(12), models, [[0, 1], [2]])["w"].item() == 7
    assert grouped_mean(model(12), models, [[1, 0], [2]])["w"].item() == 7


def test_the_server_weighs_s_of_k_plus_s() -> None:
    """Four clients at 0 in two groups, the server at 3: 3 · 2/(4 + 2) = 1. In one group: 3/5."""
    models = {k: model(0) for k in range(4)}
    assert grouped_mean(model(3), models, [[0, 3], [1, 2]])["w"].item() == 1
    assert grouped_mean(model(3), models, [[0, 1, 2, 3]])["w"].item() == torch.tensor(3 / 5).item()


def test_a_group_that_nobody_answers_from_is_the_servers_model() -> None:
    """Server 12; {0: 0} gives 6, the other group 12: together 9."""
    assert grouped_mean(model(12), {0: model(0)}, [[0], [1, 2]])["w"].item() == 9


def test_server_and_clients_start_from_the_same_model() -> None:
    setup, method = make()
    server, current = setup.server(), Round(1, (0, 1, 2), range(3))
    start = method.initial_state(server)
    state, requests = method.server_round(current, start, server)
    w = start.tensors["average"]
    assert all(torch.equal(requests[k].tensors["model"][n], v) for k in range(3) for n, v in w.items())
    own = train_supervised(server, w, 1, stream="rounds")
    assert all(torch.equal(state.tensors["server"][n], v) for n, v in own.items())

    ended = method.collect(current, state, {}, server)  # nobody answers: the server's own model
    assert all(torch.equal(ended.tensors["model"][n], v) for n, v in own.items())
    assert ended.tensors["model"] is ended.tensors["average"] and "server" not in ended.tensors


def test_groups_are_dealt_anew_each_round_and_hold_everybody_once() -> None:
    """Client k's weights are 10^k, the server's 0, in groups of 2 and 1 with the server: the client that is
    alone weighs ¼, the other two ⅙ each. All of the three are alone in some round."""
    setup, method = make()
    server = setup.server()
    zero = {"w": torch.zeros(1, dtype=torch.float64)}
    alone = set()
    for t in range(1, 30):
        current, state = Round(t, (0, 1, 2), range(3)), Packet({"server": zero, "average": zero})
        replies = {
            k: Packet({"model": {"w": torch.tensor([10.0**k], dtype=torch.float64)}}) for k in range(3)
        }
        value = method.collect(current, state, replies, server).tensors["average"]["w"].item()
        shares = {k: 111 / 6 + 10**k / 12 for k in range(3)}
        alone |= {k for k, share in shares.items() if abs(share - value) < 1e-9}
    assert alone == {0, 1, 2}
