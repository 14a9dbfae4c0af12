"""pfl: FedAvg on its simulated backend, in one process (usual) or in two (tuned).

Usage: run_pfl.py WORK OUT ROUNDS WAY

With two processes, each trains half of the clients, and pfl reduces their statistics with torch.distributed.
pfl joins the process group when it is imported, so its environment variables are set before.
"""

import os
import socket
import subprocess
import sys
from functools import partial

import torch
import work
from torch.nn.functional import cross_entropy

PATH, OUT, ROUNDS, WAY = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
ADDRESSES, RANK = "PFL_WORKER_ADDRESSES", "PFL_WORKER_RANK"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if WAY == "tuned" and RANK not in os.environ:
    os.environ |= {ADDRESSES: f"127.0.0.1:{free_port()},127.0.0.1:0", RANK: "0", "GLOO_SOCKET_IFNAME": "lo"}
    other = subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {RANK: "1"})

from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.dataset import Dataset  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.data.sampling import get_user_sampler  # noqa: E402
from pfl.hyperparam.base import NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics, Weighted  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402


class ShuffledDataset(Dataset):
    """A client's images, shuffled in every epoch as in the other contestants."""

    def iter(self, batch_size):
        return work.batches(*self.raw_data, batch_size)


class Network(work.LeNet):
    """LeNet with the two functions that pfl calls."""

    def loss(self, x, y):
        return cross_entropy(self(x), y)

    def metrics(self, x, y):
        """pfl always evaluates round 1; here that costs nothing."""
        return {"images": Weighted(len(y), 1)}


class Laps(TrainingProcessCallback):
    def on_train_begin(self, *, model):
        watch.start()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        watch.lap()
        return False, Metrics()


if __name__ == "__main__":
    torch.set_num_threads(1)
    shared, watch = work.load(PATH), work.Stopwatch()
    users = list(range(len(shared.labels)))
    data = FederatedDataset(
        lambda k: ShuffledDataset((shared.images[k], shared.labels[k]), user_id=str(k)),
        get_user_sampler("minimize_reuse", users),
    )
    network = Network()
    network.load_state_dict(shared.weights)
    if WAY == "tuned":
        network.to(memory_format=torch.channels_last)
    model = PyTorchModel(
        network,
        partial(torch.optim.SGD, fused=True) if WAY == "tuned" else torch.optim.SGD,
        torch.optim.SGD(network.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=ROUNDS,
            evaluation_frequency=ROUNDS + 1,
            train_cohort_size=len(users),
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(
            local_num_epochs=work.EPOCHS, local_learning_rate=work.LR, local_batch_size=work.BATCH
        ),
        callbacks=[Laps()],
        send_metrics_to_platform=False,
    )
    if os.environ.get(RANK, "0") == "0":
        watch.finish(network, OUT)
        if WAY == "tuned":
            other.wait()
    sys.stdout.flush()
    os._exit(0)  # otherwise torch.distributed aborts a process that ends before the other one
