"""Flower's simulation on Ray: FedAvg, two workers with one core each.

Usage: run_flower.py WORK OUT ROUNDS

`run_simulation` starts faster than `flwr run`, which starts a server process first. The clients run the bare
loop of the limit, and a worker keeps images and network between messages.
"""

import sys

import torch
import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

PATH, OUT, ROUNDS = sys.argv[1], sys.argv[2], int(sys.argv[3])

client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    shared, k = work.load(PATH), int(context.node_config["partition-id"])
    model = work.scratch_network(PATH)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.train(model, shared.images[k], shared.labels[k])
    metrics = MetricRecord({"num-examples": len(shared.labels[k])})
    reply = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(reply, reply_to=message)


class TimedFedAvg(FedAvg):
    """FedAvg that takes the time of each round."""

    def configure_train(self, server_round, *arguments):
        if server_round == 1:
            watch.start()
        return super().configure_train(server_round, *arguments)

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        if len(replies) < clients or any(reply.has_error() for reply in replies):
            raise RuntimeError(f"only {len(replies)} of {clients} clients replied without an error")
        result = super().aggregate_train(server_round, replies)
        watch.lap()
        return result


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    model = work.load(PATH).network()
    strategy = TimedFedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=ROUNDS)
    model.load_state_dict(result.arrays.to_torch_state_dict())
    trained.append(model)


if __name__ == "__main__":
    clients, watch, trained = len(work.load(PATH).labels), work.Stopwatch(), []
    resources = {"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1}}
    run_simulation(server_app, client_app, clients, backend_config=resources)
    watch.finish(trained[0], OUT)
