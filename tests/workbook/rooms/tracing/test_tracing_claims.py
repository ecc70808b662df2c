"""The tracing notebook's sentences, tables and figures, on a healthy trace and on spoilt ones."""

from functools import partial

import pytest

pytest.importorskip("pandas")

import matplotlib
from tracing_rows import SETUP, healthy

from workbook.rooms.tracing import claims, plots, table
from workbook.rooms.tracing.trials import TRIALS, Setup, Traced, trials_for

matplotlib.use("agg")
KEYS = "blocks.1.attention.win.k_proj.weight"


def verdicts(traced):
    return {claim.claim: claim.verdict for claim in claims.all_claims(traced)}


def failing(traced):
    return [claim for claim, verdict in verdicts(traced).items() if verdict == "FAIL"]


def test_a_healthy_trace_passes_every_claim():
    found = verdicts(healthy())
    assert set(found.values()) == {"PASS"}
    assert len(found) == 18


def pick(rows, **wanted):
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


# (kind of row, which of them, what they become, what the one claim that fails says)
CHANGED = [
    ("arrivals", {"trial": "ddp", "rank": 1, "step": 2, "parameter": KEYS},
     {"state": "missing", "order": None, "ms": None}, "ddp: a gradient"),
    ("arrivals", {"trial": "fsdp", "parameter": "head.weight"}, {"state": "zero"},
     "fsdp: a gradient"),
    ("arrivals", {"trial": "cmp alone", "parameter": KEYS},
     {"state": "arrived", "order": 30, "ms": 1.0}, "cmp alone: a gradient"),
    ("outcomes", {"trial": "ddp", "rank": 0}, {"unreachable": [KEYS]},
     "the graph before the backward says otherwise"),
    ("outcomes", {"trial": "slc alone"}, {"losses": "of cmp alone"}, "cmp alone = slc alone"),
    ("gradients", {"trial": "fsdp", "rank": 1, "way": "rows"}, {"error": 2e-6}, "fsdp 2e-06"),
    ("gradients", {"trial": "ddp", "rank": 1, "way": "rows"}, {"error": float("nan")}, "ddp inf"),
    ("buckets", {"trial": "ddp", "rank": 1, "step": 3, "index": 0}, {"elements": 7},
     "hold each parameter once; not ddp, step 3, rank 1"),
    ("outcomes", {"trial": "static graph"}, {"losses": [5.5, 5.0, 4.8]},
     "static graph trains the same"),
    ("outcomes", {"trial": "static graph + find unused"},
     {"status": "ok", "losses": [5.0, 5.0, 5.0]}, "is refused"),
    ("arrivals", {"trial": "detached", "rank": 0, "parameter": KEYS},
     {"state": "arrived", "order": 99, "ms": 1.0}, "'detached' is named"),
    ("arrivals", {"trial": "gate x 0", "parameter": "head.weight"}, {"state": "zero"},
     "'gate x 0' is named"),
    ("outcomes", {"trial": "rank branch", "rank": 1}, {"weights": "others"}, "equal weights"),
]  # fmt: skip


def change(traced, kind, which, changes):
    if changes.get("losses") == "of cmp alone":
        changes = {"losses": pick(traced.outcomes, trial="cmp alone")[0]["losses"]}
    rows = pick(getattr(traced, kind), **which)
    assert rows
    for row in rows:
        row.update(changes)


def swap_orders(traced, kind, trial):
    first, second = pick(getattr(traced, kind), trial=trial, rank=1, step=1)[:2]
    first["order"], second["order"] = second["order"], first["order"]


def lose_buckets(traced):
    traced.buckets = [r for r in traced.buckets if (r["trial"], r["rank"]) != ("ddp", 1)]


def keep_first_buckets(traced):
    whole = pick(traced.buckets, trial="ddp", step=1)
    traced.buckets = [r for r in traced.buckets if r["trial"] != "ddp" or r["step"] != 2]
    traced.buckets += [row | {"step": 2} for row in whole]


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        *((partial(change, kind=k, which=w, changes=c), named) for k, w, c, named in CHANGED),
        (partial(swap_orders, kind="arrivals", trial="static graph"), "static graph: a gradient"),
        (partial(swap_orders, kind="modules", trial="ddp"), "module backwards"),
        (lose_buckets, "ranks differ"),
        (keep_first_buckets, "cut anew"),
    ],
)
def test_each_claim_can_fail_and_fails_alone(spoil, named):
    traced = healthy()
    spoil(traced)
    (claim,) = failing(traced)
    assert named in claim


def test_a_trial_that_did_not_end_decides_nothing_about_itself():
    traced = healthy()
    for row in traced.outcomes:
        row.update(status="timeout", place="trial 0: ddp, step 2, backward")
    found = verdicts(traced)
    assert set(found.values()) == {"INCONCLUSIVE"}
    assert "timeout at trial 0: ddp, step 2, backward" in next(iter(found))


def test_one_rank_decides_nothing_about_ranks():
    setup = Setup("cpu_test", tokens=64, batch=2, ranks=1)
    found = verdicts(healthy(setup, trials_for(1)))
    assert "FAIL" not in found.values()
    undecided = [claim for claim, verdict in found.items() if verdict == "INCONCLUSIVE"]
    assert any("module backwards" in claim for claim in undecided)
    assert any("a rank's own branch" in claim for claim in undecided)


def test_one_bucket_for_everything_shows_no_rebuilding():
    traced = healthy()
    whole = pick(traced.buckets, trial="ddp", step=1)[0]["elements"]
    traced.buckets = [row | {"elements": whole} for row in traced.buckets if row["index"] == 0]
    claim = claims.buckets_are_cut_anew(traced)
    assert claim.verdict == "INCONCLUSIVE" and "one bucket" in claim.claim


def test_the_evidence_lists_every_gradient_that_is_missing_or_zero(tmp_path):
    traced = healthy()
    listed = table.write_evidence(tmp_path, traced).set_index("file")["rows"]
    names = ("all_missing_params", "arrival_by_rank", "ddp_buckets", "module_order")
    assert list(listed.index) == [f"{name}.csv" for name in (*names, "rank_outcomes")]
    found = table.evidence(traced)["all_missing_params"]
    planted = found[found["planted"]]
    assert set(planted["trial"]) == {"rank branch", "detached", "gate x 0"}
    assert set(planted[planted["trial"] == "rank branch"]["rank"]) == {1}
    rightly = found[found["trial"] == "win alone"]
    assert set(rightly["expected"]) == {"missing"} and len(rightly) == 16 * 2 * 3
    assert len(found) == 3 * (3 * 2 * 16 + 2 + 4 + 4)
    assert listed["ddp_buckets.csv"] == len(traced.buckets)


def test_ranks_are_laid_beside_each_other():
    found = table.by_rank(table.frame(healthy(), "arrivals"))
    mine = found[(found["trial"] == "rank branch") & (found["step"] == 1)].set_index("parameter")
    assert list(mine.loc[KEYS, ["state_0", "state_1"]]) == ["arrived", "missing"]
    assert mine.loc["head.weight", "same"]
    # what comes after a missing one comes earlier
    assert not mine.loc["embed_tokens.weight", "same"]


def test_tables_of_nothing_are_empty_and_figures_say_so():
    nothing = Traced(SETUP, TRIALS)
    for found in table.evidence(nothing).values():
        assert not len(found)
    for question in ("counts", "unexpected", "buckets", "gradients"):
        assert not len(getattr(table, question)(nothing))
    assert set(verdicts(nothing).values()) == {"INCONCLUSIVE"}
    one = ["ddp"]
    drawn = [plots.arrival_order(nothing, one), plots.buckets(nothing, one)]
    for figure in (*drawn, plots.module_timeline(nothing, "ddp")):
        (axes,) = figure.axes
        assert axes.texts[0].get_text().endswith("of ddp: not traced to its end")


def test_a_failure_is_told_by_who_was_first():
    traced = healthy()
    for row, text in zip(pick(traced.outcomes, trial="fsdp"), ("lost", "the cause"), strict=True):
        row.update(status="error", message=text, first=row["rank"] == 1)
    (claim,) = failing(traced)
    assert "'fsdp', rank 1: error" in claim
    shown = table.outcomes(traced).loc["fsdp"]
    assert shown["ended"] == "error" and shown["why"] == "the cause" and shown["losses"] == ""


@pytest.mark.processes
def test_the_rows_fit_the_run_s_metrics(tmp_path):
    from workbook.runs.store import Run

    run = Run(tmp_path, "05_distributed_tracing")
    run.device("cpu")
    run.add_rows(table.to_metrics(healthy()))
    found = run.metrics()
    assert set(found["operation"]) == {"distributed_step"}
    assert {"loss", "gradients_zero", "buckets", "gradient_error"} <= set(found["metric"])


def test_a_pause_is_cut_out_of_the_timeline_and_told():
    traced = healthy()
    for row in traced.modules:
        row["ms"] = 5.0 + row["order"] + (18_000 if row["order"] > 1 else 0)
    (axes,) = plots.module_timeline(traced, "ddp").axes
    lines = axes.get_lines()
    assert max(max(line.get_xdata()) for line in lines) < 10
    assert lines[0].get_xdata()[0] == 0  # the axis begins with the first module
    (told,) = axes.texts
    assert told.get_text() == " 18 s are left out here"
    assert "began 5 ms after" in axes.get_title(loc="right")
    assert not plots.module_timeline(healthy(), "ddp").axes[0].texts


def test_every_bucket_has_a_look_and_a_legend_entry():
    traced = healthy()
    traced.buckets = [
        {"trial": "ddp", "rank": 0, "step": 1, "index": index, "elements": 1000}
        for index in range(12)
    ]
    figure = plots.buckets(traced, ["ddp"])
    looks = {(bar.get_facecolor(), bar.get_hatch()) for bar in figure.axes[0].patches}
    assert len(looks) == len(figure.legends[0].get_texts()) == 12


def test_arrivals_mark_missing_and_zero_gradients():
    figure = plots.arrival_order(healthy(), ["rank branch", "gate x 0", "win alone"])
    said = {text.get_text() for text in figure.legends[0].get_texts()}
    assert said == {"rank 0", "rank 1", "missing on rank 1", "arrives as zero", "rightly none"}
