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
    not CPU.exists()
    or "AuthenticAMD" not in CPU.read_text("utf-8")
    or torch.backends.cpu.get_cpu_capability() != "AVX2",
    reason="results were measured on AMD's processors with AVX2; others may round otherwise",
)
SHOW = "import os, torch; print(torch.backends.cpu.get_cpu_capability(), os.getenv('ONEDNN_MAX_CPU_ISA'))"
WORKER = (
    f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'import fedseal.sites; ' + {SHOW!r}])"
)


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
def test_a_method_of_one_s_own_may_compute_when_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom fedseal.methods.server_sl import ServerSL\nHALF = torch.ones(2) / 2\n"
        "class Mine(ServerSL):\n    pass\n"
    )
    own = f"fedseal.load_config('demo', {{'method': '{tmp_path / 'mine.py'}:Mine'}})"
    assert shown("import fedseal", own) == "AVX2 AVX2"


@AVX2
@pytest.mark.parametrize("before", ["pass", "import torch; torch.ones(2).sum()"])
def test_workers_compute_as_their_parent_does(before: str) -> None:
    worker, parent = shown(before, "import fedseal.api", WORKER).splitlines()
    assert worker == parent
    if before == "pass":
        assert parent == "AVX2 AVX2"


@AMD
@pytest.mark.parametrize(("cell", "rounds"), [("server-sl-dir-0.9-seed0", 3), ("semifl-dir-0.3-seed0", 3)])
def test_measured_rounds_come_out_again(cell: str, rounds: int, tmp_path: Path) -> None:
    """Every number of theirs, on a processor that the results may not have been measured on."""
    config, cpu = RESULTS / cell / "config.toml", {"engine.device": "cpu"}
    api.train(config, out=tmp_path / "run", rounds=rounds, set=cpu)
    assert numbers(tmp_path / "run", rounds) == numbers(RESULTS / cell, rounds)
