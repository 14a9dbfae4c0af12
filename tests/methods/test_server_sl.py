"""Server-SL: the server trains on its labelled images, without clients."""

import numpy as np
import torch

from fedseal import weights
from fedseal.config.config import parse
from fedseal.core import Images, Packet, Participant, Round
from fedseal.data.pool import Federation, Pool
from fedseal.learn import accuracy, predict, train_supervised
from fedseal.methods.server_sl import ServerSL
from fedseal.run_setup import RunSetup

CLASSES = ("dark", "grey", "light")


def make_setup(**server: object) -> RunSetup:
    """30 labelled and 6 validation images, and two clients with 5 images; the grey value shows the class."""
    labels = np.arange(46, dtype=np.int64) % 3
    noise = np.random.default_rng(0).integers(0, 40, (46, 1, 12, 12))
    pixels = (noise + 100 * labels[:, None, None, None]).astype(np.uint8)
    pool = Pool("test", pixels, labels, CLASSES, {"train": range(46)}, flips=False)
    rows = np.arange(46, dtype=np.int64)
    federation = Federation(pool, rows[:30], rows[30:36], (rows[36:41], rows[41:]), ("a", "b"), {})
    raw = {"method": "server-sl", "engine": {"device": "cpu"}, "server": {"batch": 8, **server}}
    return RunSetup(parse(raw, "test"), federation)


def method(setup: RunSetup) -> ServerSL:
    chosen = setup.config.selected_method()
    assert isinstance(chosen, ServerSL)
    return chosen


def everyone(t: int) -> Round:
    return Round(t, cohort=(0, 1), everyone=(0, 1))


def run(setup: RunSetup, server: Participant, rounds: int) -> Packet:
    server_sl = method(setup)
    state = server_sl.initial_state(server)
    for t in range(1, rounds + 1):
        state, requests = server_sl.server_round(everyone(t), state, server)
        assert requests == {}
        state = server_sl.collect(everyone(t), state, {}, server)
    return state


def equal(a: weights.Tensors, b: weights.Tensors) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a | b)


def test_starts_from_the_initial_weights() -> None:
    setup = make_setup()
    state = method(setup).initial_state(setup.server())
    assert list(state.tensors) == ["model"] and state.scalars == {}
    assert equal(state.tensors["model"], weights.get_weights(setup.network()))


def test_round_is_supervised_training_without_requests() -> None:
    setup = make_setup(lr=0.05, decay=0.5, epochs=2)
    server_sl, server = method(setup), setup.server()
    start = server_sl.initial_state(server)
    first, requests = server_sl.server_round(everyone(1), start, server)
    second, more = server_sl.server_round(everyone(2), first, server)
    assert requests == {} and more == {}
    w1 = train_supervised(server, start.tensors["model"], 1)
    assert equal(first.tensors["model"], w1) and not equal(w1, start.tensors["model"])
    assert equal(second.tensors["model"], train_supervised(server, w1, 2))


def test_collect_changes_nothing() -> None:
    setup = make_setup(lr=0.05, epochs=1)
    server = setup.server()
    state = run(setup, server, 1)
    stray = Packet({"model": {name: value + 1 for name, value in state.tensors["model"].items()}})
    after = method(setup).collect(everyone(1), state, {0: stray}, server)
    assert list(after.tensors) == ["model"] and after.scalars == {}
    assert equal(after.tensors["model"], state.tensors["model"])


def test_client_ignores_a_request() -> None:
    setup = make_setup()
    client = setup.client(0, setup.network())
    assert type(client.data) is Images
    memory = Packet(scalars={"t": 7})
    reply, after = method(setup).client_round(Packet({"model": {}}, {"t": 1}), memory, client)
    assert reply.tensors == {} and reply.scalars == {} and after == memory


def test_learns_an_easy_task() -> None:
    """The grey value separates the classes, so the validation accuracy rises from chance to 1."""
    setup = make_setup(lr=0.02, epochs=5)
    server = setup.server()
    seen = []
    for rounds in (0, 4):
        probs = predict(server, run(setup, server, rounds).tensors["model"], server.validation)
        seen.append(accuracy(probs, server.validation.labels))
    assert seen[0] < 0.7 and seen[1] == 1.0


def test_result_depends_only_on_configuration_and_seed() -> None:
    """The previous weights of the server's model and the cohort have no influence."""
    setup = make_setup(lr=0.02, epochs=1)
    first = run(setup, setup.server(), 2).tensors["model"]
    server = setup.server()
    initial = method(setup).initial_state(server)
    with torch.no_grad():
        for parameter in server.model.parameters():
            parameter.fill_(9.0)
    state, _ = method(setup).server_round(Round(1, (), ()), initial, server)
    state, _ = method(setup).server_round(Round(2, (), ()), state, server)
    assert equal(state.tensors["model"], first)


def test_without_augmentation() -> None:
    """`server.augment = "none"` is the paper's "Server-SL w/o DA". It gives other weights."""
    results = []
    for augment in ("weak", "none"):
        setup = make_setup(lr=0.02, epochs=1, augment=augment)
        results.append(run(setup, setup.server(), 1).tensors["model"])
    assert not equal(*results)
