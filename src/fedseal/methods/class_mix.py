"""The option `mix`: a client labels its images by its own class mix, which never leaves it.

The server sends the calibration of its model. See label_shift.py and docs/label-shift.md.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from fedseal.core import Packet, Participant, Server
from fedseal.label_shift import Calibration, calibrate, estimate_mix
from fedseal.learn import predict_logits
from fedseal.weights import Tensors

GROUP = "calibration"  # of a request
DESCRIPTION = "label with the client's own class mix"


def calibration_of(w: Tensors, server: Server) -> Calibration:
    """The calibration of a model on the server's validation images."""
    return calibrate(predict_logits(server, w, server.validation), server.validation.labels)


def with_calibration(requests: Mapping[int, Packet], server: Server) -> dict[int, Packet]:
    """The same request for all clients, with the calibration of its model."""
    request = next(iter(requests.values()))
    group = calibration_of(request.tensors["model"], server).to_tensors()
    return dict.fromkeys(requests, Packet({**request.tensors, GROUP: group}, request.scalars))


def find_adapter(request: Packet, client: Participant) -> Callable[[Tensor], Tensor]:
    """What a client does with the logits by which it labels: nothing, if the request has no calibration."""
    if GROUP not in request.tensors:
        return lambda logits: logits
    calibration = Calibration.from_tensors(request.tensors[GROUP])
    logits = predict_logits(client, request.tensors["model"], client.data)
    mix = estimate_mix(calibration.probs(logits), calibration)
    return lambda logits: calibration.adapt(logits, mix)
