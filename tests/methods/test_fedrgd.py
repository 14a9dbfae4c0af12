"""FedRGD: averaging in groups, with hand-derived numbers, and the model that a round starts from."""

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


def test_groups_are_averaged_with_the_server_and_then_with_each_other() -> None:
    """Server 12; groups {0: 0, 1: 3} and {2: 6}: (12 + 0 + 3)/3 = 5 and (12 + 6)/2 = 9, with mean 7."""
    models = {0: model(0), 1: model(3), 2: model(6)}
    assert grouped_mean(model(12), models, [[0, 1], [2]])["w"].item() == 7
    assert grouped_mean(model(12), models, [[1, 0], [2]])["w"].item() == 7


def test_server_has_the_weight_s_of_k_plus_s() -> None:
    """K = 4 clients at 0 in S = 2 groups and the server at 3 give 3 · 2/(4 + 2) = 1. One group gives 3/5."""
    models = {k: model(0) for k in range(4)}
    assert grouped_mean(model(3), models, [[0, 3], [1, 2]])["w"].item() == 1
    assert grouped_mean(model(3), models, [[0, 1, 2, 3]])["w"].item() == torch.tensor(3 / 5).item()


def test_group_without_replies_counts_as_the_model_of_the_server() -> None:
    """Server 12; the group {0: 0} gives 6 and the group without replies 12, with mean 9."""
    assert grouped_mean(model(12), {0: model(0)}, [[0], [1, 2]])["w"].item() == 9


def test_server_and_clients_start_from_the_same_model() -> None:
    setup, method = make()
    server, current = setup.server(), Round(1, (0, 1, 2), range(3))
    start = method.initial_state(server)
    state, requests = method.server_round(current, start, server)
    w = start.tensors["average"]
    assert all(torch.equal(requests[k].tensors["model"][n], v) for k in range(3) for n, v in w.items())
    trained = train_supervised(server, w, 1, stream="rounds")
    assert all(torch.equal(state.tensors["server"][n], v) for n, v in trained.items())

    after = method.collect(current, state, {}, server)  # without replies: the model of the server
    assert all(torch.equal(after.tensors["model"][n], v) for n, v in trained.items())
    assert after.tensors["model"] is after.tensors["average"] and "server" not in after.tensors


def test_groups_are_drawn_in_every_round_and_contain_every_client_once() -> None:
    """Client k's weight is 10^k and the server's is 0. One group has two clients and one has a single client.
    The single client has the share ¼, the others have ⅙ each. Each client is the single one at some time."""
    setup, method = make()
    server = setup.server()
    zero = {"w": torch.zeros(1, dtype=torch.float64)}
    single = set()
    for t in range(1, 30):
        current, state = Round(t, (0, 1, 2), range(3)), Packet({"server": zero, "average": zero})
        replies = {
            k: Packet({"model": {"w": torch.tensor([10.0**k], dtype=torch.float64)}}) for k in range(3)
        }
        value = method.collect(current, state, replies, server).tensors["average"]["w"].item()
        shares = {k: 111 / 6 + 10**k / 12 for k in range(3)}
        single |= {k for k, share in shares.items() if abs(share - value) < 1e-9}
    assert single == {0, 1, 2}
