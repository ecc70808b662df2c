"""Measurements of one sequence on several ranks: what is refused, what is sent, what is equal."""

import json

import pytest

from workbook.lab.measure.shapes import TINY_CONFIG, Shape
from workbook.rooms.long_context import __main__ as command
from workbook.rooms.long_context.cells import Cell

SHAPE = Shape(256, 4, 2, 16, 16, dtype="fp32", config=TINY_CONFIG)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ranks": 3}, "tokens=256 on 3 ranks are no chunks of whole blocks; a multiple of 48"),
        ({"ranks": 0}, "ranks=0 must be at least 1"),
        ({"ranks": 4, "method": "ulysses"}, "ranks=4 does not divide kv_heads=2"),
        ({"ranks": 2, "heads_at_once": 3}, "heads_at_once=3 does not divide kv_heads=2"),
        ({"ranks": 2, "method": "gathers"}, "gather"),
    ],
)
def test_cells_that_cannot_be_shared_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Cell(SHAPE, **given)


def test_bytes_are_those_of_the_design():
    """1M tokens on 4, HQ 64, HKV 4, D 128: 1.61 GB of keys and values, 0.1 GB of compressed."""
    cell = Cell(Shape(2**20), ranks=4)
    sent = cell.sent_bytes()
    assert sent["forward"] == pytest.approx(1.61e9 + 0.101e9, rel=0.01)
    assert sent["backward"] == 2 * sent["forward"]
    each = Cell(Shape(2**20), ranks=4, method="ulysses").sent_bytes()["forward"]
    assert each == pytest.approx(6.9e9, rel=0.02)
    assert Cell.from_dict(json.loads(json.dumps(cell.to_dict()))) == cell
    assert not any(Cell(SHAPE).sent_bytes().values())


def test_the_command_refuses_what_cannot_be_run(tmp_path, capsys):
    assert command.main(["--out", str(tmp_path), "--ranks", "2", "--tokens", "1000"]) == 2
    assert "no chunks of whole blocks" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.slow
def test_two_ranks_equal_one_and_are_measured(tmp_path, capsys):
    sizes = ["--tokens", "512", "--heads", "4", "--kv-heads", "2", "--dim", "16"]
    where = ["--device", "cpu", "--dtype", "fp32", "--backend", "gather", "--out", str(tmp_path)]
    assert command.main(["--ranks", "2", *sizes, *where, "--deadline", "300"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(r["cell"]["ranks"], r["cell"]["method"]) for r in rows] == [
        (1, "gather"), (2, "gather"), (2, "ulysses"),
    ]  # fmt: skip
    for row in rows:
        assert row["outcome"] == "ok" and min(row["ms"].values()) > 0
        assert max(row.get("difference", {"o": 0.0}).values()) <= 1e-12
    alone, shared = rows[0]["memory_mib"], rows[1]["memory_mib"]
    assert shared["backward"] < alone["backward"]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and said[1].startswith("T=512 on 2 gather: forward ")
