"""FedLab: FedAvg in one process (standalone mode: usual), or with a server and two client processes (tuned).

Usage: run_fedlab.py WORK OUT ROUNDS WAY
"""

import logging
import socket
import sys
import types

import torch
import work

for name in ("torchvision", "torchvision.datasets", "torchvision.transforms"):
    # FedLab imports it for data sets that are not used here; there is no build for this PyTorch without CUDA.
    sys.modules[name] = types.ModuleType(name)
sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]

from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler  # noqa: E402
from fedlab.contrib.dataset.basic_dataset import FedDataset  # noqa: E402
from fedlab.core.client.manager import PassiveClientManager  # noqa: E402
from fedlab.core.network import DistNetwork  # noqa: E402
from fedlab.core.server.manager import SynchronousServerManager  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402

PATH, OUT, ROUNDS, WAY = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
PROCESSES = 2


class Epoch:
    """A data loader without worker processes: each iteration is one shuffled epoch."""

    def __init__(self, images, labels, batch_size):
        self.images, self.labels, self.batch_size = images, labels, batch_size

    def __iter__(self):
        return work.batches(self.images, self.labels, self.batch_size)


class ClientData(FedDataset):
    def get_dataloader(self, id, batch_size, type="train"):
        make = Epoch if WAY == "tuned" else work.loader
        return make(shared.images[id], shared.labels[id], batch_size)


class Trainer(FedAvgSerialClientTrainer):
    """FedLab's own training loop; tuned: with the fused optimizer and channels-last weights."""

    def __init__(self, clients):
        super().__init__(shared.network(WAY), clients)
        self.setup_dataset(ClientData())
        self.setup_optim(work.EPOCHS, work.BATCH, work.LR)
        if WAY == "tuned":
            self.optimizer = torch.optim.SGD(self._model.parameters(), work.LR, fused=True)

    @property
    def model_parameters(self):
        """FedLab flattens with `view`, which channels-last weights do not allow."""
        return work.flatten(self._model)


class Handler(FedAvgServerHandler):
    """FedAvg that takes the time of each round."""

    def __init__(self):
        network = work.LeNet()
        network.load_state_dict(shared.weights)
        super().__init__(network, ROUNDS, sample_ratio=1.0)

    def global_update(self, buffer):
        super().global_update(buffer)
        watch.lap()


class Pipeline(StandalonePipeline):
    def evaluate(self):
        """No evaluation."""


class Server(SynchronousServerManager):
    def main_loop(self):
        watch.start()
        super().main_loop()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_clients(address: tuple[str, str], rank: int, clients: int) -> PassiveClientManager:
    """Starts a process that simulates some of the clients."""
    network = DistNetwork(address, PROCESSES + 1, rank, ethernet="lo")
    manager = PassiveClientManager(network, Trainer(clients))
    manager.start()
    return manager


if __name__ == "__main__":
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    shared, watch = work.load(PATH), work.Stopwatch()
    handler = Handler()
    if WAY == "usual":
        pipeline = Pipeline(handler, Trainer(len(shared.labels)))
        watch.start()
        pipeline.main()
    else:
        address = ("127.0.0.1", free_port())
        share = len(shared.labels) // PROCESSES
        processes = [run_clients(address, rank, share) for rank in range(1, PROCESSES + 1)]
        # The server tells each client its number among all clients.
        Server(DistNetwork(address, PROCESSES + 1, 0, ethernet="lo"), handler, mode="GLOBAL").run()
        for process in processes:
            process.join()
    watch.finish(handler.model, OUT)
