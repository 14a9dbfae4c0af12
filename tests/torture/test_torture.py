"""Some disturbances of each kind: no run is lost, and each ends with the same result as undisturbed."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from deployed import torture_deployment, torture_messages
from single import torture_exporting, torture_reproducing, torture_training

from torture import Tally, Turn, torture

ONE_MACHINE = (
    Turn("train", torture_training, 4, 12),
    Turn("export", torture_exporting, 1, 30),
    Turn("reproduce", torture_reproducing, 1, 2),
)
# With the same number of rounds, both are compared with one undisturbed deployment.
SEVERAL = (Turn("deployment", torture_deployment, 1, 3), Turn("messages", torture_messages, 0, 3))


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize(("turns", "kills"), [(ONE_MACHINE, 3), (SEVERAL, 1)], ids=["one machine", "several"])
def test_disturbed_runs_end_as_if_undisturbed(turns: tuple[Turn, ...], kills: int, tmp_path: Path) -> None:
    tally = Tally(seed=1)
    torture(tmp_path, tally, kills=1000, runs=len(turns), jobs=len(turns), turns=turns)
    assert not tally.lost and not tally.different, "\n".join(tally.lost + tally.different)
    assert tally.kills >= kills and tally.runs.total() == len(turns)
    assert turns == ONE_MACHINE or {"message late", "message twice"} <= tally.disturbances.keys()
