"""Portable arithmetic on every processor with AVX2, and imports that do not change the environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedseal.system.environment import AVX2 as VARIABLES
from fedseal.system.environment import FLOWER

AVX2 = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this processor has no AVX2")
SHOW = "import os, torch; print(torch.backends.cpu.get_cpu_capability(), os.getenv('ONEDNN_MAX_CPU_ISA'))"
SET_UP = "from fedseal.system.environment import set_up_process; set_up_process()"
WORKER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SET_UP!r} + '; ' + {SHOW!r}])"


def shown(*statements: str, **environment: str) -> str:
    """The instruction set of a new process after these statements, and the one that its children inherit."""
    clean = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", "\n".join((*statements, SHOW))],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_importing_the_package_does_not_change_the_environment() -> None:
    """Imports all modules in a new process. Other packages may change the environment."""
    pytest.importorskip("flwr")
    script = """
import os, pkgutil, importlib
import flwr.simulation, matplotlib.pyplot, ray, torch, torch.utils.tensorboard
before = dict(os.environ)
import fedseal
packages = pkgutil.walk_packages(fedseal.__path__, "fedseal.")
modules = [m.name for m in packages if m.name != "fedseal.__main__"]
for name in modules:
    importlib.import_module(name)
changed = {key for key in before.keys() | os.environ.keys() if before.get(key) != os.environ.get(key)}
print(len(modules), sorted(changed))
"""
    clean = {key: value for key, value in os.environ.items() if key not in VARIABLES | FLOWER}
    clean["BROWSER_USE_SETUP_LOGGING"] = "false"  # Flower sets it
    done = subprocess.run([sys.executable, "-c", script], env=clean, capture_output=True, text=True)
    number, changed = done.stdout.split(maxsplit=1)
    assert int(number) > 60 and changed.strip() == "[]", done.stdout + done.stderr


@AVX2
@pytest.mark.parametrize("entry", ["load_config('demo')", "load('none')", "train('demo', out='/')"])
def test_every_entry_point_computes_with_avx2(entry: str) -> None:
    """This includes calls that end with an error."""
    call = f"import contextlib, fedseal\nwith contextlib.suppress(fedseal.UserError): fedseal.{entry}"
    assert shown(call) == "AVX2 AVX2"


@AVX2
def test_variables_turn_portable_arithmetic_off() -> None:
    plain = shown("pass")
    assert shown(SET_UP, MKL_ENABLE_INSTRUCTIONS="AVX2") == plain
    assert shown(SET_UP, ATEN_CPU_CAPABILITY="default") == "DEFAULT None"


@AVX2
def test_user_defined_method_may_compute_when_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom fedseal.methods.server_sl import ServerSL\nHALF = torch.ones(2) / 2\n"
        "class Mine(ServerSL):\n    pass\n"
    )
    load = f"fedseal.load_config('demo', {{'method': '{tmp_path / 'mine.py'}:Mine'}})"
    assert shown("import fedseal", load) == "AVX2 AVX2"


@AVX2
@pytest.mark.parametrize("before", ["pass", "import torch; torch.ones(2).sum()"])
def test_workers_use_the_instruction_set_of_their_parent(before: str) -> None:
    worker, parent = shown(before, SET_UP, WORKER).splitlines()
    assert worker == parent
    if before == "pass":
        assert parent == "AVX2 AVX2"
