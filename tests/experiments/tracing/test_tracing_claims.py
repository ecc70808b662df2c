import pytest

pytest.importorskip("pandas")

from tracing_rows import SETUP, healthy

from nsa.experiments.tracing import claims as tracing_claims
from nsa.experiments.tracing import table as tracing_table
from nsa.experiments.tracing.trials import TRIALS, Setup, Traced, trials_for

KEYS = "blocks.1.attention.k_proj.win.weight"


def verdicts(traced):
    return {claim.claim: claim.verdict for claim in tracing_claims.all_claims(traced)}


def failing(traced):
    return [claim for claim, verdict in verdicts(traced).items() if verdict == "FAIL"]


def test_a_healthy_trace_passes_every_claim():
    found = verdicts(healthy())
    assert set(found.values()) == {"PASS"}
    assert len(found) == 18


def pick(rows, **wanted):
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def lose_a_gradient(traced):
    (row,) = pick(traced.arrivals, trial="ddp", rank=1, step=2, parameter=KEYS)
    row.update(state="missing", order=None, ms=None)


def zero_a_gradient(traced):
    for row in pick(traced.arrivals, trial="fsdp", parameter="head.weight"):
        row["state"] = "zero"


def gain_a_gradient(traced):
    for row in pick(traced.arrivals, trial="cmp alone", parameter=KEYS):
        row.update(state="arrived", order=30, ms=1.0)


def swap_two_arrivals(traced):
    a, b = pick(traced.arrivals, trial="static graph", rank=1, step=1)[:2]
    a["order"], b["order"] = b["order"], a["order"]


def let_the_graph_disagree(traced):
    pick(traced.outcomes, trial="ddp", rank=0)[0]["unreachable"] = [KEYS]


def swap_two_modules(traced):
    a, b = pick(traced.modules, trial="ddp", rank=1, step=1)[:2]
    a["order"], b["order"] = b["order"], a["order"]


def let_branches_agree(traced):
    loss = pick(traced.outcomes, trial="cmp alone")[0]["losses"]
    for row in pick(traced.outcomes, trial="slc alone"):
        row["losses"] = loss


def move_a_gradient(traced):
    pick(traced.gradients, trial="fsdp", rank=1, way="rows")[0]["error"] = 2e-6


def break_a_gradient(traced):
    pick(traced.gradients, trial="ddp", rank=1, way="rows")[0]["error"] = float("nan")


def lose_elements(traced):
    pick(traced.buckets, trial="ddp", rank=1, step=3)[0]["elements"] -= 1


def lose_a_rank_of_buckets(traced):
    traced.buckets = [r for r in traced.buckets if (r["trial"], r["rank"]) != ("ddp", 1)]


def keep_the_first_buckets(traced):
    total = pick(traced.buckets, trial="ddp", step=1)[0]["elements"]
    traced.buckets = [r for r in traced.buckets if r["trial"] != "ddp" or r["step"] != 2]
    for rank in (0, 1):
        row = {"trial": "ddp", "rank": rank, "step": 2, "index": 0, "elements": total}
        traced.buckets.append({**row, "bytes": 4 * total, "dtype": "float32", "is_last": True,
                               "ms": 1.0})  # fmt: skip


def train_otherwise(traced):
    for row in pick(traced.outcomes, trial="static graph"):
        row["losses"] = [5.5, 5.0, 4.8]


def accept_the_contradiction(traced):
    for row in pick(traced.outcomes, trial="static graph + find unused"):
        row.update(status="ok", losses=[5.0, 5.0, 5.0])


def heal_the_fault(traced):
    for row in pick(traced.arrivals, trial="detached", rank=0, parameter=KEYS):
        row.update(state="arrived", order=99, ms=1.0)


def spoil_more(traced):
    for row in pick(traced.arrivals, trial="gate x 0", parameter="head.weight"):
        row["state"] = "zero"


def let_weights_differ(traced):
    pick(traced.outcomes, trial="rank branch", rank=1)[0]["weights"] = "others"


def fail(traced):
    for row in pick(traced.outcomes, trial="fsdp"):
        row.update(status="error", message="ValueError: no", first=row["rank"] == 1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lose_a_gradient, "ddp: a gradient"),
        (zero_a_gradient, "fsdp: a gradient"),
        (gain_a_gradient, "cmp alone: a gradient"),
        (swap_two_arrivals, "static graph: a gradient"),
        (let_the_graph_disagree, "the graph before the backward says otherwise"),
        (swap_two_modules, "module backwards"),
        (let_branches_agree, "cmp alone = slc alone"),
        (move_a_gradient, "fsdp 2e-06"),
        (break_a_gradient, "ddp inf"),
        (lose_elements, "hold each parameter once; not ddp, step 3, rank 1"),
        (lose_a_rank_of_buckets, "ranks differ"),
        (keep_the_first_buckets, "cut anew"),
        (train_otherwise, "static graph trains the same"),
        (accept_the_contradiction, "is refused"),
        (heal_the_fault, "'detached' is named"),
        (spoil_more, "'gate x 0' is named"),
        (let_weights_differ, "equal weights"),
        (fail, "'fsdp', rank 1: error"),
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
    claim = tracing_claims.buckets_are_cut_anew(traced)
    assert claim.verdict == "INCONCLUSIVE" and "one bucket" in claim.claim


def test_the_evidence_lists_every_gradient_that_is_missing_or_zero(tmp_path):
    traced = healthy()
    listed = tracing_table.write_evidence(tmp_path, traced).set_index("file")["rows"]
    assert set(listed.index) == {f"{name}.csv" for name in tracing_table.EVIDENCE}
    found = tracing_table.evidence(traced)["all_missing_params"]
    planted = found[found["planted"]]
    assert set(planted["trial"]) == {"rank branch", "detached", "gate x 0"}
    assert set(planted[planted["trial"] == "rank branch"]["rank"]) == {1}
    rightly = found[found["trial"] == "win alone"]
    assert set(rightly["expected"]) == {"missing"} and len(rightly) == 16 * 2 * 3
    assert len(found) == 3 * (3 * 2 * 16 + 2 + 4 + 4)
    assert listed["ddp_buckets.csv"] == len(traced.buckets)


def test_ranks_are_laid_beside_each_other():
    table = tracing_table.by_rank(tracing_table.frame(healthy(), "arrivals"))
    mine = table[(table["trial"] == "rank branch") & (table["step"] == 1)].set_index("parameter")
    assert list(mine.loc[KEYS, ["state_0", "state_1"]]) == ["arrived", "missing"]
    assert mine.loc["head.weight", "same"]
    assert not mine.loc["embed.weight", "same"]  # what comes after a missing one comes earlier


def test_tables_of_nothing_are_empty():
    nothing = Traced(SETUP, TRIALS)
    for table in tracing_table.evidence(nothing).values():
        assert not len(table)
    for question in ("counts", "unexpected", "buckets", "gradients"):
        assert not len(getattr(tracing_table, question)(nothing))
    assert set(verdicts(nothing).values()) == {"INCONCLUSIVE"}


def test_a_failure_is_told_by_who_was_first():
    traced = healthy()
    fail(traced)
    for row, text in zip(pick(traced.outcomes, trial="fsdp"), ("lost", "the cause"), strict=True):
        row["message"] = text
    shown = tracing_table.outcomes(traced).loc["fsdp"]
    assert shown["ended"] == "error" and shown["why"] == "the cause" and shown["losses"] == ""


@pytest.mark.processes
def test_the_rows_fit_the_run_s_metrics(tmp_path):
    from nsa.workbook.store import Run

    run = Run(tmp_path, "05_distributed_tracing")
    run.add_rows(tracing_table.to_metrics(healthy()))
    table = run.metrics()
    assert set(table["operation"]) == {"distributed_step"}
    assert {"loss", "gradients_zero", "buckets", "gradient_error"} <= set(table["metric"])
