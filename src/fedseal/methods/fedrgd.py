"""FedRGD (Zhang et al. 2021, "Improving Semi-supervised Federated Learning by Reducing the Gradient Diversity
of Models"): grouping-based averaging, group normalisation, and FixMatch's loss at the clients.

Server and clients train in parallel from the same global model. The cohort is divided into random groups in
each round. The server's model is averaged with each group, then the groups' averages are averaged. So the
server weighs more than a client: S/(K + S) of the total for K clients in S equal groups.

Differences from the original:
- Groups change in each round, and everybody starts from the mean of the groups. In the original code groups
  are fixed, and a group's clients continue from their group's average.
- Learning rates, epochs and batches come from the configuration. The original averages every 16 steps and
  multiplies all learning rates by the number of models in a group. Here, raise `server.lr` only: with a high
  client learning rate, clients follow the first class that becomes confident and assign it to every image
  (`docs/evidence.md`).
- GroupNorm is a setting of the network (`model.norm = "group"`). Networks with BatchNorm are refused.

"Non-IID" in the FedRGD paper means one class per client, so its numbers, which the FedSEAL paper quotes, are
not comparable with a Dirichlet split.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from pydantic import Field

from fedseal.aggregate import mean
from fedseal.core import Packet, Round, Server
from fedseal.learn import train_supervised
from fedseal.methods.class_mix import with_calibration
from fedseal.methods.fedavg_fixmatch import FedAvgFixMatch
from fedseal.models import refuse_batch_norm
from fedseal.weights import Tensors


class FedRGD(FedAvgFixMatch):
    """The `[fedrgd]` section."""

    needs_single_replies: ClassVar[bool] = True  # to average groups

    threshold: float = Field(0.95, ge=0, le=1, description="minimum confidence of a pseudo-label")
    groups: int = Field(2, ge=1, description="S: number of groups; the server is averaged into each")

    def check(self, server: Server) -> None:
        refuse_batch_norm(server.model, "FedRGD")

    def server_round(self, current: Round, state: Packet, server: Server) -> tuple[Packet, dict[int, Packet]]:
        w = state.tensors["average"]
        trained = train_supervised(server, w, current.t, stream="rounds")
        request = Packet({"model": w}, {"t": current.t, "train": True})
        requests = dict.fromkeys(current.cohort, request)
        after = Packet({**state.tensors, "server": trained})
        return after, with_calibration(requests, server) if self.mix else requests

    def collect(self, current: Round, state: Packet, replies: Mapping[int, Packet], server: Server) -> Packet:
        order = torch.randperm(len(current.cohort), generator=server.rng(current.t, "groups"))
        groups = [[current.cohort[i] for i in part] for part in order.tensor_split(self.groups)]
        w = grouped_mean(
            state.tensors["server"],
            {k: reply.tensors["model"] for k, reply in replies.items()},
            groups,
            lambda models: server.aggregation.combine(models, state.tensors["average"], current.t),
        )
        return Packet({"model": w, "average": w})


def grouped_mean(
    server: Tensors,
    models: Mapping[int, Tensors],
    groups: list[list[int]],
    combine: Callable[[Mapping[int, Tensors]], Tensors] = mean,
) -> Tensors:
    """The mean over groups of the combined models of the server and of the group's clients."""
    means = {
        i: combine({-1: server} | {k: models[k] for k in group if k in models})
        for i, group in enumerate(groups)
    }
    return mean(means)
