"""The settlement: facts are comparisons, verdicts follow from them alone, and any can fall."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import correlation, linear_regression, mean, median, stdev

import pytest
from claim_calls import claims_of
from places import committed_root

from workbook.rooms.case_study import figures
from workbook.rooms.case_study.loop.design import peak_mib
from workbook.rooms.case_study.settlement import claims, plots, table
from workbook.rooms.case_study.settlement.claims import (
    CONTRADICTED,
    KINDS,
    NOT,
    SIDES,
    Fact,
    Row,
    settle,
)
from workbook.runs import metrics
from workbook.runs.scaling import fit_exponent, local_exponents
from workbook.runs.store import Run

ROWS = claims.all_rows()
COMMITTED = committed_root()
KEPT = COMMITTED / "2026-11-24/06_case_study_settlement-666a2464"
STEP5 = COMMITTED / "2026-11-24/03_step5_hang_bisection-8c596233"
# Nobody kept a record, nobody ran it, 03 ran at a T too short for what it asks (H3), its trials
# differ by as much (C20), or a number of which there is no record decides alone (P1).
OPEN = {"C5", "C20", "C27", "H3", "H13", "H14", "H16", "P1"}


@pytest.fixture(scope="module")
def found():
    return claims.all_facts(KEPT)


def verdicts(found):
    return {one.row.id: one.verdict for one in settle(found)}


def test_there_is_one_row_for_each_contradiction_cause_ledger_entry_and_note():
    ids = [row.id for row in ROWS]
    counts = {"C": 28, "H": 18, "L": 9, "N": 7, "P": 3}
    assert ids == [f"{kind}{n + 1}" for kind in KINDS for n in range(counts[kind])]


def test_no_row_has_a_verdict_of_its_own():
    text = Path(claims.__file__).with_name("rows.yaml").read_text()
    fields = re.findall(r"^  (\w+):", text, re.MULTILINE)
    assert "verdict" not in fields and set(SIDES) < set(fields)


def fact(name, holds, *evidence):
    value = {True: 1.0, False: 0.0, None: None}[holds]
    return Fact(name, "", value, ">=", 1.0, evidence=evidence)


def row_of(*sides):
    named = zip(SIDES.values(), sides, strict=False)
    return Row("C1", "x", "y", {verdict: names for verdict, names in named if names})


@pytest.mark.parametrize(
    ("confirms", "refutes", "explains", "verdict"),
    [
        (True, False, False, "CONFIRMED"),
        (False, True, False, "REFUTED"),
        (False, False, True, "EXPLAINED"),
        (True, True, False, CONTRADICTED),
        (True, True, None, CONTRADICTED),
        (True, None, False, "INCONCLUSIVE"),
        (False, False, False, "INCONCLUSIVE"),
        (False, False, None, "INCONCLUSIVE"),
        (None, None, None, "INCONCLUSIVE"),
    ],
)
def test_the_rule(confirms, refutes, explains, verdict):
    row = row_of(("a",), ("b",), ("c",))
    known = {"a": fact("a", confirms), "b": fact("b", refutes), "c": fact("c", explains)}
    [one] = settle(known, [row])
    assert one.verdict == verdict
    assert bool(one.settles) == (verdict == "INCONCLUSIVE")


def test_a_side_holds_only_whole_and_not_asks_for_the_contrary():
    row = row_of(("a", "not b"), ("not a",))
    for a, b, verdict in (
        (True, False, "CONFIRMED"),
        (True, True, "INCONCLUSIVE"),
        (True, None, "INCONCLUSIVE"),
        (False, None, "REFUTED"),
    ):
        assert settle({"a": fact("a", a), "b": fact("b", b)}, [row])[0].verdict == verdict


def test_a_stated_number_decides_nothing_alone_and_is_named_beside_others():
    stated, measured = fact("a", True, "table:RERUN"), fact("b", True, "table:MEMORY_MIB")
    known = {"a": stated, "b": measured, "c": fact("c", False)}
    [alone] = settle(known, [row_of(("a",), ("c",))])
    assert alone.verdict == "INCONCLUSIVE" and "stated" not in str(alone)
    assert alone.settles == "CONFIRMED by stated numbers alone, a"
    [both] = settle(known, [row_of(("a", "b"), ("c",))])
    assert str(both) == "C1 CONFIRMED: x; stated, without a record: a"
    assert (stated.seen, measured.seen) == ("1 (>= 1 asked, stated)", "1 (>= 1 asked)")


@pytest.fixture(scope="module")
def flips(found):
    """By row, the facts whose number, moved across its limit, changes the row's verdict."""
    by_row = {row.id: set() for row in ROWS}
    for name, one in found.items():
        outside = (one.limit - 1, one.limit + 1, one.limit)
        other = next(x for x in outside if replace(one, value=x).holds is not one.holds)
        using = [row for row in ROWS if any(name in side or NOT + name in side
                                            for side in row.sides.values())]  # fmt: skip
        changed = settle(found | {name: replace(one, value=other)}, using)
        for before, after in zip(settle(found, using), changed, strict=True):
            if before.verdict != after.verdict:
                by_row[before.row.id].add(name)
    return by_row


def test_every_decided_row_falls_with_a_number(found, flips):
    decided = [id for id, verdict in verdicts(found).items() if verdict != "INCONCLUSIVE"]
    assert set(verdicts(found)) - set(decided) == OPEN
    assert [id for id in decided if not flips[id]] == []


def test_every_fact_is_used_and_each_of_a_decided_row_flips_a_verdict(found, flips):
    assert {name for row in settle(found) for name in row.facts} == set(found)
    used = {name for one in settle(found) if one.row.id not in OPEN for name in one.facts}
    assert sorted(used - set().union(*flips.values())) == []


def test_every_fact_has_a_number_and_names_its_evidence(found):
    assert [f.name for f in found.values() if f.value is None or not f.evidence] == []
    trials = {path.name for path in KEPT.glob("trials/*")}
    read = {e.partition(":")[2] for f in found.values() for e in f.evidence if e[:5] == "trial"}
    assert read == trials


def test_a_fact_that_the_run_lacks_leaves_its_row_open(found):
    lacking = found | {"something-grows": replace(found["something-grows"], value=None)}
    one = next(one for one in settle(lacking) if one.row.id == "H9")
    assert (one.verdict, one.settles) == ("INCONCLUSIVE", "no number of something-grows is kept")
    assert table.facts(lacking, "trial").loc["something-grows"]["is"] == ""


def microseconds():
    return [t.microseconds for t in figures.ALL_TIMINGS]


def totals():
    return {layers: total for layers, (_, _, total) in figures.LAYER_SCALING_S.items()}


def beyond_the_line():
    first = {layers: total for layers, total in totals().items() if layers < 12}
    line = linear_regression(list(first), list(first.values()))
    return totals()[12] / (line.intercept + 12 * line.slope)


def off(found, wanted):
    return max(abs(found[key] / wanted[key] - 1) for key in wanted)


def students_t(costs):
    return abs(mean(costs)) / (stdev(costs) / len(costs) ** 0.5)


PEAK, GIB = figures.PRODUCTION_PEAK_MIB, figures.A100_GIB
# What numbers of the reports' figures are computed by.
COMPUTED = {
    "grows-as-square": lambda: (
        fit_exponent([*figures.MEMORY_MIB], [*figures.MEMORY_MIB.values()]).exponent
    ),
    "ends-as-square": lambda: local_exponents(
        [*figures.MEMORY_MIB], [*figures.MEMORY_MIB.values()]
    )[-1],
    "copies-explain": lambda: off({s: peak_mib(*s) for s in figures.PEAKS_MIB}, figures.PEAKS_MIB),
    "window-was-truncated": lambda: peak_mib(5, 2048, right_window=True) / figures.MEMORY_MIB[2048],
    "estimator-recovered": lambda: off(
        {t: figures.estimate_mib(t) for t in figures.PUBLISHED_ESTIMATE_MB},
        figures.PUBLISHED_ESTIMATE_MB,
    ),
    "estimator-elsewhere": lambda: off(figures.ESTIMATE_MIB, figures.MEMORY_MIB),
    "backward-is-151": lambda: PEAK * 2**20 / 1e9 / figures.PRODUCTION_GB["backward"],
    "loop-fits": lambda: PEAK / 1024 / GIB,
    "right-window-does-not-fit": lambda: peak_mib(12, 2048, right_window=True) / 1024 / GIB,
    "one-constant": lambda: off(
        dict(enumerate(figures.held_out_us(microseconds()))), dict(enumerate(microseconds()))
    ),
    "seconds-follow-layers": lambda: correlation([*totals()], [*totals().values()]) ** 2,
    "twelve-layers-end": beyond_the_line,
    "speed-is-66": lambda: 66.0 / (256 / totals()[12]),
    "one-step-for-all": lambda: len(set(figures.STEPS_REACHED.values())),
    "too-fast-for-12-layers": lambda: figures.TOY_RUN_TOKENS_PER_S / figures.TOKENS_PER_S[0][1],
    "packing-costs": lambda: students_t([*figures.SAFE_PACKING_PERCENT.values()]),
    "rtx-is-slower": lambda: (
        median(t.microseconds for t in figures.ALL_TIMINGS if t.gpu == "RTX 3090")
        / median(t.microseconds for t in figures.ALL_TIMINGS if t.gpu == "A100")
    ),
    "limits-too-short": lambda: min(
        t.seconds / limit
        for _, layers, tokens, _, limit in figures.DEADLINES
        for t in figures.ALL_TIMINGS
        if (t.layers, t.tokens) == (layers, tokens)
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_kept_number_is_what_the_reports_figures_give(found, name):
    assert found[name].value == pytest.approx(COMPUTED[name](), rel=1e-9)


def test_what_was_mended_after_the_run_is_what_the_named_run_of_03_says(found):
    frame = metrics.read(STEP5 / "metrics.csv")
    frame = frame[frame["metric"] == "steps_reached"]
    reached = list(zip(frame["median"], metrics.configs(frame), strict=True))
    watched = ("aux_stats", "tracing", "blocking")
    plain = {"path": "loop", "deadline": 1.0, "lock_at": 0} | dict.fromkeys(watched, False)

    def least(**changed):
        cell = plain | {"layers": 1} | changed
        return min(n for n, c in reached if c == c | cell and c["old_rule"] != "PASS")

    run = Run(STEP5).verdicts()
    seen = next(e["evidence"]["found"] for e in run if e["claim"].startswith("no verdict changes"))
    told = {name: least() - seen[name]["was in step"] for name in ("tracing", "launch blocking")}
    assert found["layers-move"].value == least() - least(layers=6)
    assert found["traced-comes-less-far"].value == told["tracing"]
    assert found["blocking-comes-less-far"].value == told["launch blocking"]


@pytest.mark.parametrize(
    ("kept", "complaint"),
    [("06-x", "06-x"), ("01_memory_scaling-28623959", "has no facts; a run of 06")],
)
def test_a_run_without_facts_is_refused(kept, complaint):
    with pytest.raises(ValueError, match=complaint):
        claims.check_parameters({"kept": kept})


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (row_of(("no such",), ("b",)), "'no such', which is no fact"),
        (row_of((), ("b",)), "names no facts that confirm it"),
        (row_of(("b",)), "or none that do otherwise"),
    ],
)
def test_a_row_that_could_come_out_one_way_only_is_refused(row, complaint):
    with pytest.raises(ValueError, match=complaint):
        settle({"b": fact("b", True)}, [row])


def test_claims_carry_facts_with_their_limits_and_fail_when_contradicted(found):
    made = claims.all_claims(settle(found))
    assert len(made) == len(ROWS)
    assert all(claim.evidence["evidence"] for claim in made)
    assert json.dumps([claim.evidence for claim in made])
    told = made[6].evidence["facts"]["speed-is-66"]
    assert told[1:] == [False, "4.987 (<= 1.1 asked)"]
    row = row_of(("a",), ("b",))
    both = settle({"a": fact("a", True), "b": fact("b", True)}, [row])
    assert [claim.verdict for claim in claims.all_claims(both)] == ["FAIL"]
    assert claims.fewer_undecided_than(both, 46).verdict == "FAIL"
    assert claims.fewer_undecided_than(settle(found), 65).verdict == "PASS"
    assert claims.fewer_undecided_than(settle(found), 0).verdict == "INCONCLUSIVE"


def test_a_stored_run_says_what_todays_rules_make_of_its_numbers():
    run = Run(KEPT)
    of, calls = claims_of(run.folder)
    made = [call(of) for call in calls.values()]
    now = {claim.claim: claim.verdict for claim in made}
    assert {entry["claim"]: entry["verdict"] for entry in run.verdicts()} == now
    changed = [e for e in run.verdicts() if e["verdict"] != e.get("was", e["verdict"])]
    assert [e["claim"].split()[0] for e in changed] == ["C20", "H13", "P1", "57"]


def test_what_is_refuted_explained_or_void_says_what_is_taken_back(found):
    for one in settle(found):
        if one.verdict in ("REFUTED", "EXPLAINED", "VOID"):
            assert one.row.retraction, one.row.id


def test_the_tables_say_each_row_once_with_value_and_limit(found):
    settled = settle(found)
    for kind in KINDS:
        ids = [row.id for row in ROWS if row.id[0] == kind]
        assert list(table.rows(settled, kind).index) == ids
    shown = table.rows(settled, "C").loc["C7"]
    assert shown["facts for it"] == "speed-is-66, no: 4.987 (<= 1.1 asked)"
    assert shown["evidence"] == "table:TOKENS_PER_S, table:LAYER_SCALING_S"
    kinds = [len(table.facts(found, kind)) for kind in ("table", "trial", "run")]
    assert sum(kinds) == len(found) and min(kinds) > 10
    assert (len(table.memory()), len(table.timings())) == (6, 15)


def test_figures_are_drawn(found):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    for figure in (plots.memory(), plots.microseconds(), plots.verdicts(settle(found))):
        figure.canvas.draw()
        matplotlib.pyplot.close(figure)


def test_the_case_studys_figures_are_as_its_reports_have_them():
    for layers, (forward, backward, total) in figures.LAYER_SCALING_S.items():
        assert forward + backward == pytest.approx(total, abs=0.002), layers
    peaks, estimates = figures.MEMORY_MIB, figures.PUBLISHED_ESTIMATE_MB
    off = {t: round(100 * (mb / peaks[t] - 1), 1) for t, mb in estimates.items()}
    assert off == {128: -52.6, 512: -71.2, 1024: -54.2, 2048: 5.1}
    assert {t: first for t, (first, _) in figures.TABLES_MB.items()}.items() <= peaks.items()
    assert all(a < b for a, b in pairwise(totals().values()))
