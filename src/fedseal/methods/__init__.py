"""The methods by name. Adding one is adding a file and a line here."""

from fedseal.core import Method
from fedseal.methods.fedavg_fixmatch import FedAvgFixMatch
from fedseal.methods.fedavg_sl import FedAvgSL
from fedseal.methods.fedavg_uda import FedAvgUDA
from fedseal.methods.fedseal import FedSEAL
from fedseal.methods.server_sl import ServerSL

METHODS: dict[str, type[Method]] = {
    "fedseal": FedSEAL,
    "server-sl": ServerSL,
    "fedavg-sl": FedAvgSL,
    "fedavg-fixmatch": FedAvgFixMatch,
    "fedavg-uda": FedAvgUDA,
}
