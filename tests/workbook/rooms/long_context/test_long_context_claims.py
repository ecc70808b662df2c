"""Tables, claims and figures of shared sequences from a few made rows, and one real launch."""

import json
import math

import pytest
import torch

from workbook.lab.measure.shapes import TINY_CONFIG, Shape
from workbook.rooms.long_context import child, claims, plots, table, trials
from workbook.rooms.long_context.cells import Cell, cells_of, rank_bytes

K, M = 2**17, 2**20
SAME = {"o": 0.001, "q": 0.002, "rows": 0.0002}
ONE = {"forward": 100.0, "backward": 200.0}


def row(tokens=K, ranks=1, method="gather", efficiency=0.97, gpu=True, **changes):
    """Row of a cell that ended well; on several ranks so much of P times as fast as ONE."""
    cell = Cell(Shape(tokens), ranks, method)
    times = {name: ms / ranks / (efficiency if ranks > 1 else 1.0) for name, ms in ONE.items()}
    held = {name: size / 2**20 for name, size in rank_bytes(cell).items()}
    found = {"cell": cell.to_dict(), "outcome": "ok", "message": "", "ms": times}
    found |= {"memory_mib": held, "device": "a GPU" if gpu else "cpu", "torch": "2"}
    if gpu:
        found["sending"] = {"step_ms": 1.0, "sent_ms": 0.5, "alone_ms": 0.25}
    return found | changes


def rows(**of_several):
    """128k, 512k and 1M on 1, 2 and 4 ranks; `of_several` changes cells of several ranks."""
    found = []
    for tokens in (K, 4 * K, M):
        for ranks in (1, 2, 4):
            compared = {"difference": dict(SAME)} if tokens == K and ranks > 1 else {}
            found.append(row(tokens, ranks, **(compared | of_several if ranks > 1 else {})))
    return found


def verdict(given, words):
    (found,) = (claim for claim in claims.all_claims(given) if words in claim.claim)
    return found.verdict


def test_all_claims_hold_where_every_aim_is_met():
    found = claims.all_claims(rows())
    assert [claim.verdict for claim in found] == ["PASS"] * 9
    assert "97.0 % by gather, at least 95.0 %, on a GPU; the aim is for H100s" in found[2].claim


@pytest.mark.parametrize(
    ("several", "words", "wanted"),
    [
        ({"difference": SAME | {"q": 0.02}}, "the same", "FAIL"),
        ({"difference": SAME | {"q": math.nan}}, "the same", "FAIL"),
        ({"difference": SAME | {"o": None}}, "the same", "FAIL"),
        ({"difference": SAME | {"rows": 0.002}}, "the same", "FAIL"),
        ({"outcome": "error"}, "without an error", "FAIL"),
        ({"outcome": "oom"}, "without an error", "INCONCLUSIVE"),
        ({"efficiency": 0.94}, "128k on 2 ranks", "AIM MISSED"),
        ({"efficiency": 0.89}, "128k on 4 ranks", "AIM MISSED"),
        ({"efficiency": 0.95}, "512k on 2 ranks", "AIM MISSED"),
        ({"efficiency": 0.92}, "512k on 4 ranks", "AIM MISSED"),
        ({"ms": {"forward": 951.0, "backward": 1.0}}, "the forward is", "AIM MISSED"),
        ({"ms": {"forward": 1.0, "backward": 1951.0}}, "the backward is", "AIM MISSED"),
        ({"memory_mib": {"forward": 1.0, "backward": 1.0}}, "memory", "AIM MISSED"),
    ],
)
def test_each_claim_can_fail(several, words, wanted):
    assert verdict(rows(**several), words) == wanted


def test_a_cpu_decides_equality_in_fp64_and_no_aim():
    found = [row(K, n, gpu=False, difference={"o": 1e-13} if n > 1 else {}) for n in (1, 2)]
    said = [claim.verdict for claim in claims.all_claims(found)]
    assert said == ["PASS", "PASS", *["NOT APPLICABLE"] * 7]
    found[1]["difference"]["o"] = 1e-11
    assert verdict(found, "the same") == "FAIL"


def test_rows_compared_without_one_selection_stand_aside():
    found = [row(K), row(K, 2, difference={"o": 0.07, "q": 0.15})]
    assert verdict(found, "the same") == "NOT APPLICABLE"
    assert (
        "1 of 2 cells"
        in claims.equals_one_rank([*found, rows()[1] | {"cell": rows()[2]["cell"]}]).claim
    )


def test_aims_are_of_their_shape_and_their_cells_alone():
    other = [
        one | {"cell": Cell(Shape(K, heads=32), n).to_dict()}
        for n, one in ((1, row()), (2, row(K, 2)))
    ]
    assert verdict(other, "128k on 2 ranks") == "NOT APPLICABLE"
    assert verdict([row(K, 2)], "128k on 2 ranks") == "NOT APPLICABLE"  # one rank was not measured
    assert verdict([row(K), row(K, 2)], "1M on 4 ranks the forward") == "NOT APPLICABLE"


def test_the_faster_method_counts_and_is_named():
    both = [row(K), row(K, 2, efficiency=0.9), row(K, 2, "ulysses", efficiency=0.96)]
    assert "96.0 % by ulysses" in claims.reaches(both, *claims.AIMS[0]).claim
    line = table.faster(both).loc[("128k", 2)]
    assert (line["faster"], line["the next, %"]) == ("ulysses", "+7")
    assert table.faster(both[:2]).empty


def test_the_frame_has_efficiency_only_beside_one_rank():
    found = table.frame([row(K, 2, efficiency=0.8), row(K), row(M, 4)])
    assert found.loc[(K, 2, "gather"), "efficiency"] == pytest.approx(0.8)
    assert math.isnan(found.loc[(M, 4, "gather"), "efficiency"])
    assert (
        found.loc[(K, 2, "gather"), "forward MB"] == Cell(Shape(K), 2).sent_bytes()["forward"] / 1e6
    )
    assert found["off, %"].abs().max() < 1e-6
    shown = table.shown(found)
    assert list(shown.index.get_level_values("T")) == ["128k", "128k", "1M"]
    assert shown.loc[("1M", 4, "gather"), "efficiency"] == ""
    assert "sending" not in table.shown(table.frame([row(K, gpu=False)]))


def test_head_and_tail_chunks_have_equal_pairs_and_chunks_in_a_row_have_not():
    cell = Cell(Shape(K), 4)
    assert table.busiest(cell) == pytest.approx(1.0, abs=1e-3)
    assert table.busiest(cell, neighbours=True) == pytest.approx(7 / 4, rel=1e-3)


def test_plots_draw_rows_and_say_where_there_are_none():
    found = rows()
    made = [plots.efficiency(found, "a GPU"), plots.memory(found, ""), plots.split(found, "")]
    assert [len(fig.axes) for fig in made] == [1, 2, 1]
    assert len(made[0].axes[0].lines) == 3  # two numbers of ranks, and the dotted one
    assert len(made[1].axes[0].lines) == 6  # each measured and estimated
    assert len(made[2].axes[0].patches) == 3 * len(found)
    for draw in (plots.efficiency, plots.memory, plots.split):
        assert draw([], "").axes[0].texts


def test_metrics_hold_every_number_and_a_failed_cell_has_none():
    lost = {"cell": Cell(Shape(K), 4).to_dict(), "outcome": "oom", "message": "full"}
    found = trials.to_metrics([rows()[1], lost])
    kinds = {"latency", "extra_memory", "estimated_memory", "received", "difference"}
    assert {one["metric"] for one in found} == kinds
    assert math.isnan(found[-1]["median"]) and found[-1]["config"]["outcome"] == "oom"
    assert list(table.notes([lost])["message"]) == ["full"]
    nameless = {name: x for name, x in row().items() if name != "device"}
    assert trials.device_of(nameless) == trials.UNNAMED


def test_a_nan_is_the_largest_difference_wherever_it_stands():
    """Python's max(1.0, nan) is 1.0."""
    assert math.isnan(child.largest([1.0, math.nan])) and math.isnan(child.largest([math.nan, 1.0]))
    assert child.largest([1.0, 2.0]) == 2.0
    x, y = torch.zeros(1, 2, 1), torch.tensor([0.5, math.nan]).view(1, 2, 1)
    assert math.isnan(child.furthest(x, y, 1.0)) and child.furthest(x[:, :1], y[:, :1], 2.0) == 0.25


@pytest.mark.processes
@pytest.mark.slow
def test_cells_that_fail_on_two_ranks_are_named(tmp_path):
    """Notebook 12 runs such cells on a backend that takes them, and judges every claim."""
    sizes = {"heads": 4, "kv_heads": 2, "dim": 16, "value_dim": 16, "dtype": "fp32"}
    cells = cells_of([Shape(256, config=TINY_CONFIG, **sizes)], [1, 2], ["gather"])
    given = {"device": "cpu", "equal_up_to": 512, "deadline_s": 300.0, "folder": tmp_path}
    refused = trials.measure(cells, backend="flash", **given)  # needs a GPU
    assert {one["outcome"] for one in refused} == {"error"}
    assert verdict(refused, "without an error") == "FAIL"


def test_a_launch_that_ends_early_keeps_its_rows(tmp_path, monkeypatch):
    chosen = cells_of([Shape(K)], [1, 2, 4], ["gather"])

    def launch(entry, spec, **_):
        with open(spec["file"], "w") as file:
            print(json.dumps({"cell": spec["cells"][0], "outcome": "ok"}), file=file)
        late = {"rank": 1, "status": "timeout", "message": "late", "first": True}
        return [late | {"rank": 0, "status": "ended", "first": False}, late]

    monkeypatch.setattr("workbook.rooms.long_context.cells.run_ranks", launch)
    given = {"device": "cpu", "deadline_s": 1.0, "equal_up_to": 0}
    found = trials.measure(chosen, **given, folder=tmp_path)
    assert [one["outcome"] for one in found] == ["ok", "timeout", "not run"]
    assert found[1]["message"] == "rank 1: late"
    assert verdict(found, "without an error") == "INCONCLUSIVE"
