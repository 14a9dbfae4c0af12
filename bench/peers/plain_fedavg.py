"""FedAvg with labelled clients and without augmentation, as a method file for `fedseal train`."""

import time

from torch.nn.functional import cross_entropy

from fedseal.learn import fit, labelled_batches, learning_rate
from fedseal.methods.fedavg_sl import FedAvgSL


class PlainFedAvg(FedAvgSL):
    def train_client(self, client, request):
        start, t = request.tensors["model"], int(request.scalars["t"])

        def loss(model, images, labels):
            return cross_entropy(model(images), labels)

        epochs, generator = client.training.epochs, client.rng(t, "batches")
        batches = labelled_batches(client, client.data, epochs, generator, augment="none")
        return fit(client, start, batches, loss, learning_rate(client, t)), {}

    def metrics(self, state):
        """The time at the end of a round, so that a round's seconds include its checkpoint."""
        return {"clock": time.perf_counter()}
