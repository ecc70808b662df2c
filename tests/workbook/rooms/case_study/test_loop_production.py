"""Does the production loop need checkpointing? By what was recorded, and each loop on its own."""

import pytest

from workbook.rooms.case_study.figures import PEAKS_MIB
from workbook.rooms.case_study.loop import production
from workbook.rooms.case_study.loop.production import cells, decide, fits, run

TABLE = list(PEAKS_MIB)


def test_the_cells_are_the_reports_table_and_a_pair_of_each_loop():
    chosen = cells(12, 2048, TABLE)
    at = [(c["settings"]["changes"]["layers"], c["settings"]["tokens"]) for c in chosen]
    plain = [
        size for size, c in zip(at, chosen, strict=True)
        if c["loop"] == "as it was" and c["measure"] == "memory"
        and not c["settings"].get("checkpointing")
    ]  # fmt: skip
    assert sorted(plain) == sorted(TABLE) and len(chosen) == 10
    windows = ["truncated_cache" in c["settings"]["changes"]["defects"] for c in chosen]
    assert windows.count(False) == 2 and chosen[-1]["measure"] == "gradients"


def test_cells_that_hold_more_than_a_machine_has_are_left_out():
    sizes = [
        (c["settings"]["changes"]["layers"], c["settings"]["tokens"], c["loop"])
        for c in cells(12, 2048, TABLE)
        if c["measure"] == "memory" and fits(c, 14.0)
    ]
    assert sizes == [
        *((5, tokens, "as it was") for tokens in (128, 256, 512, 1024)),
        (12, 2048, "as it was"),
        (12, 2048, "with the right window"),
    ], "of the pairs those with checkpointing"


def test_by_its_shapes_the_loop_fits_an_a100_as_it_was_and_needs_checkpointing_when_repaired():
    leaking, repaired = decide([], 12, 2048)
    assert "as it was: 47.7 GiB (predicted) without" in leaking
    assert "4.5 GiB (predicted) with it; it does not need checkpointing on 79.6 GiB" in leaking
    assert "right window: 93.1 GiB (predicted) without" in repaired
    assert "8.3 GiB (predicted) with it; it needs checkpointing on 79.6 GiB" in repaired


def row(loop="as it was", checkpointing=False, **found):
    at = {"measure": "memory", "loop": loop, "layers": 12, "tokens": 2048}
    return at | {"checkpointing": checkpointing} | found


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(peak_mib=90 * 1024)], "90.0 GiB (recorded) without checkpointing, 4.5 GiB"),
        ([row(peak_mib=90 * 1024)], "it needs checkpointing on 79.6 GiB"),
        ([row(peak_mib=79 * 1024)], "it does not need checkpointing"),
        ([row(peak_mib=90 * 1024), row(checkpointing=True, peak_mib=80 * 1024)],
         "it is too large even with checkpointing"),
        ([row(status="oom", why="")], "47.7 GiB (predicted; it ran out of memory here)"),
        ([row(peak_mib=1.0) | {"layers": 6}], "47.7 GiB (predicted)"),
    ],
)  # fmt: skip
def test_what_was_recorded_decides(rows, said):
    assert said in decide(rows, 12, 2048)[0]


@pytest.mark.processes
@pytest.mark.long
def test_a_cpus_part_of_it_is_recorded_as_its_shapes_predict(tmp_path):
    # Below T 128 gradients, and no longer what is kept for the backward, make the peak.
    rows = run(cells(2, 128, [(1, 128), (2, 128)]), "cpu", tmp_path)
    memory = [r for r in rows if r["measure"] == "memory"]
    assert len(memory) == 5 and all(r["agrees"] for r in memory)
    for r in memory:
        assert r["peak_mib"] == pytest.approx(r["predicted_mib"], rel=0.02)
    assert rows[-1]["late"][0] > 0.5 and rows[-1]["bound"] == [0.0, 0.0]
    assert "GiB (recorded) without" in decide(rows, 2, 128)[0]


def test_a_cell_that_ended_otherwise_says_how(monkeypatch, tmp_path):
    ended = production.sweep.Outcome("oom", None, 1.0, "out of memory", 1)
    monkeypatch.setattr(production.sweep, "measure", lambda *_, **__: [ended])
    (found,) = run([cells(12, 2048, [])[0]], "cpu", tmp_path)
    assert (found["status"], found["why"], found["reported_mib"]) == (
        "oom",
        "out of memory",
        49023.0,
    )
