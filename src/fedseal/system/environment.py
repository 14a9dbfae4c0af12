"""The process's environment: the one place that changes it.

Importing fedseal changes nothing. The command line, the library's entry points and the worker processes call
`set_up_process` before they compute or import Flower.
"""

import os
import sys
from pathlib import Path

from fedseal.system.lazy import import_object

AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
ALL_INSTRUCTIONS = {"ONEDNN_MAX_CPU_ISA": "DEFAULT"}
FLOWER = {  # no telemetry, no update checks, no installation of packages; full priority for Ray's workers
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}


def set_up_process() -> None:
    """Prepares this process, and those that it starts: portable arithmetic, and a quiet Flower."""
    os.environ |= FLOWER
    use_portable_arithmetic()


def use_portable_arithmetic() -> None:
    """Computes with AVX2 even if the processor has AVX-512.

    Wider SIMD units round differently, so results would differ between machines. Set any of these variables
    to turn this off. If PyTorch has already computed in this process, it is too late, and the processes that
    it starts then use all instructions as well.
    """
    if any(key in os.environ for key in AVX2) or not _has_avx2():
        return
    os.environ |= AVX2
    if "torch" in sys.modules and import_object("torch.backends.cpu:get_cpu_capability")() != "AVX2":
        for key in AVX2:
            del os.environ[key]
        os.environ |= ALL_INSTRUCTIONS


def _has_avx2() -> bool:
    listed = Path("/proc/cpuinfo")
    if listed.exists():  # faster than importing PyTorch
        return "avx2" in listed.read_text("utf-8", "replace").split()
    return bool(import_object("torch.cpu:_is_avx2_supported")())
