"""One arithmetic on every processor that has it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedseal import api
from fedseal.machine import SAME_ARITHMETIC
from fedseal.reproduce import numbers

RESULTS = Path(__file__).parents[1] / "results" / "table-fmnist-lenet"
CPU = Path("/proc/cpuinfo")
AVX2 = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this processor has no AVX2")
AMD = pytest.mark.skipif(
    not CPU.exists() or "AuthenticAMD" not in CPU.read_text("utf-8"),
    reason="results were measured on AMD's processors; others may round otherwise",
)
SHOW = "import os, torch; print(torch.backends.cpu.get_cpu_capability(), os.getenv('ONEDNN_MAX_CPU_ISA'))"


def shown(*statements: str, **environment: str) -> str:
    """What a process of its own computes with, after these statements, and tells its own processes to."""
    clean = {key: value for key, value in os.environ.items() if key not in SAME_ARITHMETIC}
    return subprocess.run(
        [sys.executable, "-c", "\n".join((*statements, SHOW))],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@AVX2
@pytest.mark.parametrize(
    "module", ["api", "estimate", "sites", "engines.flower_client", "engines.flower_server"]
)
def test_whatever_computes_does_so_with_avx2(module: str) -> None:
    assert shown(f"import fedseal.{module}") == "AVX2 AVX2"


@AVX2
def test_a_user_may_have_the_processor_as_it_is() -> None:
    own = shown("pass")
    assert shown("import fedseal.api", MKL_ENABLE_INSTRUCTIONS="AVX2") == own
    assert shown("import fedseal.api", ATEN_CPU_CAPABILITY="default") == "DEFAULT None"


@AVX2
def test_workers_compute_as_a_process_that_has_computed_before() -> None:
    before = "import torch; torch.ones(2).sum()"
    assert shown(before, "import fedseal.api", ATEN_CPU_CAPABILITY="default") == "DEFAULT None"
    own = shown("pass")
    assert shown(before, "import fedseal.api") == ("AVX2 AVX2" if own.startswith("AVX2") else own)


@AMD
@pytest.mark.parametrize(("cell", "rounds"), [("server-sl-dir-0.9-seed0", 3), ("semifl-dir-0.3-seed0", 1)])
def test_measured_rounds_come_out_again(cell: str, rounds: int, tmp_path: Path) -> None:
    """To the bit, on a processor that the results may not have been measured on."""
    api.train(RESULTS / cell / "config.toml", out=tmp_path / "run", rounds=rounds)
    assert numbers(tmp_path / "run", rounds) == numbers(RESULTS / cell, rounds)
