"""Flower's simulation on Ray: FedAvg, two workers with one core each.

Usage: run_flower.py WORK OUT ROUNDS WAY

The usual way is `flwr run`, which starts a SuperLink first. The tuned way is `run_simulation`, which starts
faster but is deprecated. A worker keeps images and network between messages.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

ARGUMENTS = "PEERS_ARGUMENTS"  # for the processes that `flwr run` starts
if ARGUMENTS not in os.environ:
    os.environ[ARGUMENTS] = "\n".join(sys.argv[1:])
PATH, OUT, ROUNDS, WAY = os.environ[ARGUMENTS].split("\n")
APP = """
[project]
name = "peers"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "bench"
[tool.flwr.app.components]
serverapp = "app:server_app"
clientapp = "app:client_app"
"""
MODULE = """
import run_flower
client_app = run_flower.client_app
server_app = run_flower.server_app
"""
FEDERATION = "num-supernodes={} client-resources-num-cpus=1 init-args-num-cpus=2"

client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    shared, k = work.load(PATH), int(context.node_config["partition-id"])
    model = work.scratch_network(PATH, WAY)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.train(model, shared.images[k], shared.labels[k], WAY)
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
    model = work.load(PATH).network(WAY)
    strategy = TimedFedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=int(ROUNDS))
    model.load_state_dict(result.arrays.to_torch_state_dict())
    watch.finish(model, OUT)


def run_command() -> None:
    """`flwr run`, and the end of the SuperLink that it leaves running."""
    folder = Path(tempfile.mkdtemp())
    (folder / "pyproject.toml").write_text(APP)
    (folder / "app.py").write_text(MODULE)
    programs = str(Path(sys.executable).parent)
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parent),
        "FLWR_HOME": str(folder / "home"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }
    words = [
        f"{programs}/flwr",
        "run",
        str(folder),
        "--federation-config",
        FEDERATION.format(clients),
        "--stream",
    ]
    try:
        subprocess.run(words, env=os.environ | variables, check=True, stdout=sys.stderr)
    finally:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"FLWR_HOME={folder}/home\0" in (process / "environ").read_text():
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue  # it has ended, or is another user's
        shutil.rmtree(folder, ignore_errors=True)


clients, watch = len(work.load(PATH).labels), work.Stopwatch()

if __name__ == "__main__":
    if WAY == "usual":
        run_command()
    else:
        resources = {"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1}}
        run_simulation(server_app, client_app, clients, backend_config=resources)
