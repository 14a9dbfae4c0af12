"""Portable arithmetic on every processor with AVX2, and imports that do not change the environment."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from fedseal.system.environment import AVX2 as VARIABLES
from fedseal.system.environment import FLOWER

AVX2 = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="this processor has no AVX2")
SHOW = "import os, torch; print(torch.backends.cpu.get_cpu_capability(), os.getenv('ONEDNN_MAX_CPU_ISA'))"
SET_UP = "from fedseal.system.environment import set_up_process; set_up_process('portable')"
USED = "from fedseal.system.environment import used_arithmetic; print(used_arithmetic())"
WORKER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SHOW!r}])"


@cache
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


TRAIN = """
import contextlib, fedseal
with contextlib.suppress(fedseal.UserError):
    fedseal.train('demo', out='/'{})
"""


@AVX2
def test_training_computes_with_avx2_by_default() -> None:
    """This includes a call that ends with an error."""
    assert shown(TRAIN.format("")) == "AVX2 AVX2"


@AVX2
def test_native_arithmetic_uses_all_instructions() -> None:
    native = TRAIN.format(", options={'engine.arithmetic': 'native'}")
    assert shown(native) == shown("pass") == shown(native, **VARIABLES)


@AVX2
def test_reading_a_configuration_or_a_model_selects_nothing() -> None:
    calls = ("load_config('demo')", "load_config('demo', {'engine.arithmetic': 'native'})")
    code = "; ".join(["import fedseal", *(f"fedseal.{call}" for call in calls)])
    assert shown(code) == shown("pass")
    assert shown(SET_UP, code) == "AVX2 AVX2"


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
    """Also if PyTorch has computed before, when it is too late for the parent."""
    worker, used, parent = shown(before, SET_UP, WORKER, USED).splitlines()
    assert (worker, used) == (parent, "portable" if parent == "AVX2 AVX2" else "native")
    if before == "pass":
        assert parent == "AVX2 AVX2"


@AVX2
@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="AVX2 is all that there is")
def test_it_is_said_when_it_is_too_late() -> None:
    message = shown(
        "import logging, torch; torch.ones(2).sum()",
        "import sys; logging.basicConfig(stream=sys.stdout, format='%(message)s')",
        SET_UP,
    )
    assert "PyTorch has computed before with all instructions" in message
