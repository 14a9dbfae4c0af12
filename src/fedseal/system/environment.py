"""The process's environment: the one place that changes it.

Importing fedseal changes nothing. The command line, `train`, `evaluate` and the worker processes call
`set_up_process` before they compute or import Flower.
"""

import logging
import os
import sys
import warnings
from pathlib import Path

from fedseal.system.lazy import import_object

log = logging.getLogger("fedseal")

AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
FLOWER = {  # no telemetry, no update checks, no installation of packages; full priority for Ray's workers
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}

# Unless you set them: no telemetry, folders as stores, and no long wait for a server that does not answer.
MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


def set_up_process(arithmetic: str | None = None) -> None:
    """Prepares this process, and those that it starts: Flower, MLflow, and the arithmetic if it is given."""
    os.environ |= {**MLFLOW, **os.environ, **FLOWER}
    warnings.filterwarnings("ignore", "Image size .* exceeds limit")  # such an image is refused by name
    warnings.filterwarnings("ignore", "Palette images with Transparency")  # transparency is not used
    if arithmetic is not None:
        use_arithmetic(arithmetic)


def use_arithmetic(arithmetic: str) -> None:
    """Selects the instructions that PyTorch computes with: `engine.arithmetic`.

    Wider SIMD units round differently, so with all instructions results differ between processors. "portable"
    uses AVX2 even if the processor has more, "native" uses everything. PyTorch selects its instructions when
    it first computes. After that the process, and those that it starts, keep them.
    """
    portable = arithmetic == "portable" and _has_avx2()
    _set_variables(portable)
    if "torch" in sys.modules:
        used = import_object("torch.backends.cpu:get_cpu_capability")() == "AVX2"
        if portable and not used:
            log.warning("PyTorch has computed before with all instructions: engine.arithmetic is native")
        _set_variables(portable and used)


def used_arithmetic() -> str:
    """The arithmetic that is in use: portable or native."""
    return "portable" if all(os.environ.get(key) == value for key, value in AVX2.items()) else "native"


def _set_variables(portable: bool) -> None:
    for key, value in AVX2.items():
        if portable:
            os.environ[key] = value
        else:
            os.environ.pop(key, None)


def _has_avx2() -> bool:
    listed = Path("/proc/cpuinfo")
    if listed.exists():  # faster than importing PyTorch
        return "avx2" in listed.read_text("utf-8", "replace").split()
    return bool(import_object("torch.cpu:_is_avx2_supported")())
