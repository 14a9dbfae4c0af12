"""FedRGD (Zhang et al. 2021, "Improving Semi-supervised Federated Learning by Reducing the Gradient Diversity
of Models"): grouping-based averaging, group normalisation, and FixMatch's loss at the clients.

Server and clients train side by side from the same global model. The cohort is dealt into groups anew each
round; the server's model is averaged with each group, then the groups' averages are. So the server weighs
more than one client does: S/(K + S) of the whole for K clients in S equal groups.

Differs from the original: groups are dealt anew each round, and everybody starts from the mean of the groups;
in its code groups are fixed, a group's clients go on from their group's average, and only the server's copies
from the mean of all. Learning rates, epochs and batches are those of the configuration, as for every method
here; the original averages every 16 steps and multiplies all learning rates by the models in a group, to make
up for the averaging. Raise `server.lr` alone: clients that move as fast follow the first class that they are
sure of, and soon take every image for it (`docs/results.md`).
GroupNorm is a setting of the network (`model.norm = "group"`); networks with BatchNorm are refused. The
"non-IID" of the FedRGD paper's tables is one class a client, so that its numbers (which the FedSEAL paper
quotes) are not like for like with a Dirichlet split.
"""

from collections.abc import Mapping

import torch
from pydantic import Field

from fedseal import weights
from fedseal.core import Packet, Round, Site
from fedseal.learn import train_supervised
from fedseal.methods.fedavg_fixmatch import FedAvgFixMatch
from fedseal.models import refuse_batch_norm
from fedseal.weights import Tensors


class FedRGD(FedAvgFixMatch):
    """The `[fedrgd]` section."""

    threshold: float = Field(0.95, ge=0, le=1, description="confidence from which a pseudo-label counts")
    groups: int = Field(2, ge=1, description="S: groups that clients are averaged in, each with the server")

    def check(self, server: Site) -> None:
        refuse_batch_norm(server.model, "FedRGD")

    def server_round(self, round: Round, state: Packet, server: Site) -> tuple[Packet, dict[int, Packet]]:
        w = state.tensors["average"]
        own = train_supervised(server, w, round.t, stream="rounds")
        request = Packet({"model": w}, {"t": round.t, "train": True})
        return Packet({**state.tensors, "server": own}), dict.fromkeys(round.cohort, request)

    def collect(self, round: Round, state: Packet, replies: Mapping[int, Packet], server: Site) -> Packet:
        order = torch.randperm(len(round.cohort), generator=server.rng(round.t, "groups"))
        members = [[round.cohort[i] for i in part] for part in order.tensor_split(self.groups)]
        models = {k: reply.tensors["model"] for k, reply in replies.items()}
        w = grouped_average(state.tensors["server"], models, members)
        return Packet({"model": w, "average": w})


def grouped_average(server: Tensors, models: Mapping[int, Tensors], groups: list[list[int]]) -> Tensors:
    """The mean over groups of the mean of the server's model and those of the group's clients."""
    means = {
        i: weights.average({-1: server} | {k: models[k] for k in group if k in models})
        for i, group in enumerate(groups)
    }
    return weights.average(means)
