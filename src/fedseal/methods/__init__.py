"""The methods by name. To add one, add a file here and a line to `METHODS`.

A method of your own needs no line: `method = "my_file.py:MyMethod"` (docs/new-method.md).
"""

from fedseal.core import Method
from fedseal.methods.fedavg_fixmatch import FedAvgFixMatch
from fedseal.methods.fedavg_sl import FedAvgSL
from fedseal.methods.fedavg_uda import FedAvgUDA
from fedseal.methods.fedmatch import FedMatch
from fedseal.methods.fedrgd import FedRGD
from fedseal.methods.fedseal import FedSEAL
from fedseal.methods.fedshift import FedShift
from fedseal.methods.semifl import SemiFL
from fedseal.methods.server_sl import ServerSL

METHODS: dict[str, type[Method]] = {
    "fedseal": FedSEAL,
    "fedshift": FedShift,
    "server-sl": ServerSL,
    "fedavg-sl": FedAvgSL,
    "fedavg-fixmatch": FedAvgFixMatch,
    "fedavg-uda": FedAvgUDA,
    "fedmatch": FedMatch,
    "fedrgd": FedRGD,
    "semifl": SemiFL,
}
