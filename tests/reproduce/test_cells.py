"""The files of the paper's tables and figures."""

import pytest

from fedseal.errors import UserError
from fedseal.reproduce.cells import Cell, Scale, find_cell, find_table, load_tables
from fedseal.reproduce.store import identity


def test_the_paper_has_eight_tables_and_five_figures() -> None:
    tables = load_tables()
    in_paper = [name for name, table in tables.items() if not table.accuracies]
    assert sum(name.startswith("table-") for name in in_paper) == 8
    assert sum(name.startswith("figure-") for name in in_paper) == 5
    assert not any(table.paper for table in tables.values() if table.accuracies)
    with pytest.raises(UserError, match="no table or figure 'table-mnist': choose from table-svhn,"):
        find_table("table-mnist")


def test_the_changes_of_a_row_take_precedence_over_those_of_the_scale() -> None:
    table = find_table("table-cifar10")

    def rates(row: str, scale: Scale) -> tuple[float, float, int]:
        config = Cell(table, row, "IID", 0, scale).config
        return config.server.lr, config.client.lr, config.client.epochs

    assert rates("FedSEAL", "paper") == (0.001, 0.001, 5)
    assert rates("FedSEAL", "reduced") == (0.01, 0.01, 2)
    # FedRGD's server learns 3.5 times as fast as its clients, which have one epoch.
    assert rates("FedRGD", "paper") == (0.0035, 0.001, 1)
    assert rates("FedRGD", "reduced") == (0.035, 0.01, 1)
    assert table.reductions.startswith("`rounds = 20`, `model.width = 8`, ")
    assert table.reductions.endswith(
        "; FedAvg-SL: `fedavg-sl.server_step = true`; FedRGD: `server.lr = 0.035`"
    )


@pytest.mark.parametrize("name", load_tables())
@pytest.mark.parametrize("scale", ["paper", "reduced", "smoke"])
def test_every_cell_is_a_configuration(name: str, scale: Scale) -> None:
    table = find_table(name)
    cells = table.cells(2, scale)
    assert len({cell.name for cell in cells}) == len(cells) == 2 * len(table.rows) * len(table.columns)
    for cell in cells:
        assert cell.config.seed == cell.seed
        assert cell.config.rounds <= {"paper": 150, "reduced": 30, "smoke": 2}[scale]
        assert find_cell(table, cell.name, scale) == cell
    if scale != "smoke" or name.startswith("figure"):  # at that scale all columns have the same few labels
        assert len({identity(cell.config) for cell in cells}) == len(cells)
    assert all(len(values) == len(table.columns) for values in table.paper.values())
    assert table.paper.keys() <= table.rows.keys()
