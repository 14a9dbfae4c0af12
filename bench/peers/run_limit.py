"""The limit: a bare PyTorch loop in two processes, with no framework around it.

Usage: run_limit.py WORK OUT ROUNDS
"""

import sys
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn
from work import Stopwatch, Work, flatten, load, train, unflatten


def main(path: str, out: str, rounds: int) -> None:
    torch.set_num_threads(1)
    work = load(path)
    model = work.network()
    half = len(work.labels) // 2
    here, there = Pipe()
    Process(target=help_out, args=(there, work, range(half)), daemon=True).start()
    weights, watch = flatten(model), Stopwatch()
    for _ in range(rounds):
        here.send(weights.numpy())
        total = train_clients(model, weights, work, range(half, len(work.labels)))
        weights = (total + torch.from_numpy(here.recv())) / len(work.labels)
        watch.lap()
    unflatten(model, weights)
    watch.finish(model, out)


def help_out(pipe: Connection, work: Work, clients: range) -> None:
    """The other process."""
    model = work.network()
    while True:
        weights = torch.from_numpy(pipe.recv())
        pipe.send(train_clients(model, weights, work, clients).numpy())


def train_clients(model: nn.Module, weights: Tensor, work: Work, clients: range) -> Tensor:
    """The sum of the clients' weights."""
    total = torch.zeros_like(weights)
    for k in clients:
        unflatten(model, weights)
        train(model, work.images[k], work.labels[k])
        total += flatten(model)
    return total


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
