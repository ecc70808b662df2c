import json
import math
from dataclasses import replace

import pytest
from text_packages import small_shards

from workbook.rooms.quality import claims, plots, table, trials
from workbook.rooms.quality.cells import Cell
from workbook.rooms.quality.table import Interval
from workbook.runs import measured

T = 8192
LIKE = Cell("nsa", 0, T, 1 << 20, "small", 65536)


def row(variant, seed, bits=1.5, accuracy=0.9, fall=0.3, seconds=100.0, **changes):
    """Row of a cell that ended well; loss falls by `fall` beyond position 2048."""
    cell = replace(LIKE, variant=variant, seed=seed).to_dict()
    ends = [64 << n for n in range(8)]
    tasks = {kind: {str(n * T): [accuracy, 1.0] for n in (1, 2)} for kind in trials.KINDS}
    layer = {"gates": [0.2, 0.3, 0.5], "entropy": 1.0, "union": {"4": {"20": 3, "22": 1}}}
    layer |= {
        "union_mean": {"4": 20.5, "64": 60.0},
        "forced": 0.2,
        "first_anyway": 0.5,
        "local_anyway": 0.9,
    }
    found = {
        "cell": cell, "outcome": "ok", "bits": bits, "parameters": 21, "tokens_s": 1e5,
        "device": "a GPU", "torch": "2", "tasks": tasks,
        "curve": [[1, seconds / 2, bits + 1.0], [2, seconds, bits]],
        "by_position": {str(T): {str(e): bits + (fall if e <= 2048 else 0) for e in ends}},
        "selections": {str(T): [layer]} if variant == "nsa" else {},
        "selected": [{"bytes": n, "layers": [layer]} for n in (1, 2)] if variant == "nsa" else [],
    }  # fmt: skip
    return found | changes


def rows(seeds=3, noise=0.001, **nsa):
    """NSA, dense and both controls, which lose."""
    found = []
    for seed in range(seeds):
        jitter = noise * (-1) ** seed
        found.append(row("nsa", seed, **{"bits": 1.5 + jitter} | nsa))
        found.append(row("dense", seed, bits=1.5, seconds=150.0))
        found += [row(variant, seed, bits=1.8 + 2 * jitter) for variant in ("window", "compressed")]
    return found


def verdicts(given):
    return [claim.verdict for claim in claims.all_claims(given)]


def test_seeds_are_paired_on_one_text_alone():
    """Another machine has other packages: its passages are easier or harder for every variant."""
    a, b = ({"data": {"sha256": {"held-out": text}}} for text in ("a", "b"))
    given = [row("nsa", 0, bits=1.5, **a), row("dense", 0, bits=1.4, **a)]
    given += [row("nsa", 1, bits=1.3, **b), row("dense", 1, bits=1.4, **a)]
    assert table.paired(given, "nsa", "dense", T, table.bits).values == (pytest.approx(0.1),)
    assert len(table.equal_minutes(given, T).values) == 1
    assert list(table.overview(given)["text"]) == ["A, B", "A"]
    assert "text" not in table.overview(rows())


def test_what_dense_attention_would_lose_is_a_line_a_layer():
    held = {"far": 0.5, "chosen": 0.2, "best": 0.6}
    given = [row("dense", seed, coverage=[{"nsa": held}] * 2) for seed in (0, 1)]
    found = table.covered([*given, row("dense", 2)])
    assert list(found["layer"]) == [0, 1] and list(found["nsa"]) == ["0.20 / 0.60"] * 2
    assert table.covered(rows()).empty


def test_an_interval_is_students():
    found = Interval((1.0, 2.0, 3.0))
    assert found.mean == 2.0 and found.half == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert (found.low, found.high) == (2.0 - found.half, 2.0 + found.half)
    assert Interval((1.0,)).half == math.inf and "one seed" in Interval((1.0,)).told()
    assert Interval(()).told() == "none"


def test_all_claims_hold_where_nsa_is_as_good_and_faster():
    assert verdicts(rows()) == ["PASS"] * 9


@pytest.mark.parametrize(
    ("nsa", "claim", "verdict"),
    [
        ({"bits": 1.52}, "equal tokens", "AIM MISSED"),
        ({"seconds": 400.0}, "equal minutes", "AIM MISSED"),
        ({"fall": 0.1}, "falls from position", "AIM MISSED"),
        ({"accuracy": 0.5}, "accuracy of tracking", "AIM MISSED"),
        ({"bits": 1.9}, "window branch alone", "FAIL"),
        ({"bits": 1.9}, "compressed branch alone", "FAIL"),
    ],
)
def test_each_claim_can_fail(nsa, claim, verdict):
    (found,) = (c for c in claims.all_claims(rows(**nsa)) if claim in c.claim)
    assert found.verdict == verdict


def with_arm(seeds=3, **arm):
    return rows() + [row("shared-kv", seed, **arm) for seed in range(seeds)]


@pytest.mark.parametrize(
    ("arm", "claim", "verdict"),
    [
        ({}, "shared-kv", "PASS"),
        ({"bits": 1.52}, "shared-kv has +1.33", "AIM MISSED"),
        ({"bits": 1.52}, "of NSA's bits a byte more", "AIM MISSED"),
        ({"seconds": 400.0}, "equal minutes shared-kv", "AIM MISSED"),
        ({"fall": 0.1}, "shared-kv's loss falls from position", "AIM MISSED"),
        ({"accuracy": 0.5}, "shared-kv's accuracy of tracking", "AIM MISSED"),
    ],
)
def test_a_variant_of_several_seeds_is_held_against_dense_attention_and_nsa(arm, claim, verdict):
    told = claims.all_claims(with_arm(**arm))
    assert {one.verdict for one in told if claim in one.claim} == {verdict}
    assert sum("shared-kv" in one.claim for one in told) == 7
    assert [one.verdict for one in told if "shared-kv" not in one.claim] == ["PASS"] * 9
    assert not any("shared-kv" in one.claim for one in claims.all_claims(with_arm(seeds=1, **arm)))


def test_a_variant_s_selections_stand_beside_nsa_s():
    picked = row("nsa", 0)["selections"]
    both = table.selected(with_arm(selections=picked))
    assert list(both["variant"]) == ["nsa", "shared-kv"]
    assert "variant" not in table.selected(with_arm(seeds=1, selections=picked))


def test_what_the_interval_leaves_open_is_inconclusive():
    found = rows(noise=0.01)
    assert claims.as_good_at_equal_tokens(found, T).verdict == "INCONCLUSIVE"
    assert claims.as_good_at_equal_tokens(rows(seeds=1), T).verdict == "INCONCLUSIVE"


def test_models_that_learnt_little_decide_nothing_but_divergence():
    found = [one | {"bits": one["bits"] + 3} for one in rows()]
    assert verdicts(found)[:2] == ["PASS", "NOT APPLICABLE"]
    assert claims.control_loses(rows()[:2], T, "window").verdict == "NOT APPLICABLE"


@pytest.mark.parametrize(
    ("dense", "claim"), [({"accuracy": 0.04}, "accuracy of"), ({"fall": 0.01}, "falls from")]
)
def test_what_dense_attention_does_not_learn_is_no_credit_to_nsa(dense, claim):
    found = [one for one in rows(**dense) if one["cell"]["variant"] != "dense"]
    found += [row("dense", seed, **dense) for seed in range(3)]
    told = [c for c in claims.all_claims(found) if claim in c.claim]
    assert told and {c.verdict for c in told} == {"NOT APPLICABLE"}
    equal = [c.claim for c in claims.all_claims(found) if " equal " in c.claim]
    early = ["attention itself gains little beyond 2k" in claim for claim in equal]
    assert early == ["fall" in dense] * 2


def test_a_diverged_seed_is_counted_and_stands_in_no_mean():
    found = rows()
    found[0] = {"cell": found[0]["cell"], "outcome": "diverged"}
    claim = claims.nothing_diverged(found)
    assert claim.verdict == "FAIL" and claim.claim.startswith("1 of 12 trainings diverged")
    line = table.overview(found).loc[("8k", "nsa")]
    assert (line["seeds"], line["diverged"]) == (2, 1)
    assert claims.nothing_diverged([]).verdict == "INCONCLUSIVE"
    failed = {"cell": found[0]["cell"], "outcome": "oom", "message": "oom: full"}
    assert claims.nothing_diverged([failed, *rows()[1:]]).verdict == "INCONCLUSIVE"
    assert list(table.notes([failed])["message"]) == ["oom: full"]


def test_a_claim_on_nothing_measured_has_no_number_in_its_sentence():
    found = [{"cell": one["cell"], "outcome": "not run", "message": "late"} for one in rows()]
    told = claims.all_claims(found)
    assert {claim.verdict for claim in told} == {"INCONCLUSIVE"}
    assert not any("none" in claim.claim for claim in told)


def test_equal_minutes_are_those_of_the_faster_and_read_between_looks():
    assert table.at_seconds(row("nsa", 0, bits=1.0), 75.0) == pytest.approx(1.5)
    found = table.equal_minutes(rows(noise=0.0), T)  # dense at 100 of its 150 s: a third to go
    assert found.values == pytest.approx([-2 / 3] * 3)
    on_cpu = [one | {"device": "cpu"} for one in rows()]
    assert claims.better_at_equal_minutes(on_cpu, T).verdict == "NOT APPLICABLE"


def test_plots_draw_rows_and_say_where_there_are_none():
    found = rows()
    for fig in (
        plots.by_position(found, "note"), plots.while_training(found, "note", True),
        plots.tasks(found, "note"), plots.unions(found, "note"),
        plots.selection_while_training(found, "note"),
    ):  # fmt: skip
        assert any(axes.lines or axes.collections for axes in fig.axes)
    for empty in (plots.by_position([], ""), plots.tasks([], ""), plots.unions([], "")):
        assert empty.axes[0].texts
    assert list(table.selected(found)["union of 4"]) == [20.5]


def test_lines_of_several_seeds_are_named_once():
    drawn = plots.selection_while_training(rows(3), "note")
    named = [[told.get_text() for told in axes.texts] for axes in drawn.axes if axes.lines]
    assert [sorted(one) for one in named] == [
        ["compressed", "selected", "window"], ["layer 0"], ["text of 8k"]
    ]  # fmt: skip


def test_metrics_hold_every_number_and_a_failed_cell_has_none():
    found = trials.to_metrics([row("nsa", 0), {"cell": row("dense", 1)["cell"], "outcome": "oom"}])
    assert {"bits", "speed", "needle", "recall", "tracking", "bits_at"} == {
        r["metric"] for r in found
    }
    assert math.isnan(found[-1]["median"]) and found[-1]["config"]["outcome"] == "oom"


def test_rows_of_several_calls_are_joined_and_a_done_one_wins(tmp_path):
    failed = {"cell": row("nsa", 0)["cell"], "outcome": "error"}
    for name, content in (("a", [failed, row("dense", 0)]), ("b", [row("nsa", 0)])):
        trials.write(content, tmp_path)
        (tmp_path / trials.FILE).rename(tmp_path / name)
    for order in ("ab", "ba"):
        found = trials.read([str(tmp_path / name) for name in order], LIKE)
        assert sorted((r["cell"]["variant"], r["outcome"]) for r in found) == [
            ("dense", "ok"), ("nsa", "ok")
        ]  # fmt: skip
    (tmp_path / "c").write_text("no json")
    with pytest.raises(ValueError, match="c holds no rows"):
        trials.read([str(tmp_path / "c")], LIKE)


def test_rows_of_another_training_are_left_out_and_alone_are_refused(tmp_path):
    other = row("nsa", 0)
    other["cell"] = replace(LIKE, bytes=3 << 20, batch_tokens=T).to_dict()
    trials.write([other, row("dense", 1)], tmp_path)
    file = str(tmp_path / trials.FILE)
    assert [one["cell"]["variant"] for one in trials.read([file], LIKE)] == ["dense"]
    trials.write([other], tmp_path)
    with pytest.raises(ValueError, match=r"no cell of .* with train_bytes=3145728, batch_tokens="):
        trials.read([file], LIKE)


def test_rows_of_earlier_calls_are_read_under_todays_names(tmp_path):
    stored = json.dumps(row("dense", 1)).replace('"variant"', '"arm"')
    assert '"arm": "dense"' in stored
    (tmp_path / trials.FILE).write_text(stored + "\n")
    assert trials.read([str(tmp_path / trials.FILE)], LIKE) == [row("dense", 1)]


@pytest.mark.full
@pytest.mark.processes
def test_cells_are_trained_in_processes_of_their_own(tmp_path):
    text = small_shards(tmp_path).folder
    cells = [
        Cell(variant, 0, 512, 1024, "tiny", 512, precision="fp32") for variant in ("nsa", "dense")
    ]
    cells += [Cell("nsa", 0, 1 << 15, 1 << 17, "tiny", 1 << 15)]  # longer than the text
    given = {"device": "cpu", "threads": 1, "workers": 3, "text": text}
    found = trials.measure(cells, **given, deadline_s=120.0, progress=False)
    assert [one["outcome"] for one in found] == ["ok", "ok", "error"]
    assert "take at most" in found[2]["message"] and json.dumps(found)


def test_rows_are_found_from_the_top_of_the_clone_too(tmp_path, monkeypatch):
    trials.write([row("nsa", 0)], tmp_path)
    monkeypatch.setattr(measured, "PACKAGE", tmp_path / "nsa")
    assert len(trials.read([trials.FILE], LIKE)) == 1
    with pytest.raises(ValueError, match=r"other.jsonl holds no rows"):
        trials.read(["other.jsonl"], LIKE)
