"""The settlement: facts are comparisons, verdicts follow from them alone, and any can fall."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from claim_calls import claims_of
from places import committed_root

from whyhung.process.trial import Outcome
from workbook.rooms.case_study import figures
from workbook.rooms.case_study.settlement import claims, facts, plots, sources, table, trials
from workbook.rooms.case_study.settlement.claims import CONTRADICTED, KINDS, SIDES, Row, settle
from workbook.rooms.case_study.settlement.facts import Asked, Fact
from workbook.rooms.case_study.settlement.trials import TRIALS
from workbook.runs.store import Run

ROWS = claims.all_rows()
# What the trials found on two CPU cores, and those that ask for one on an H100.
FOUND = json.loads(Path(__file__).with_name("settlement_trials.json").read_text())
RUNS = {
    "step5": "03_step5_hang_bisection-8c596233",
    "sharding": "04_throughput-c9ebf4f2",
    "ranks": "05_distributed_tracing-220edbf3",
    "versions": "torch_versions-b3b844b5.json",
}
COMMITTED = committed_root()
QUICK = (
    "one-query", "boolean-mask", "fp16-adamw", "in-place", "pruning", "branches", "duplicates",
    "checkpointing",
)  # fmt: skip
# Nobody kept a record, nobody ran it, 03 ran at a T too short for what it asks (H3), its trials
# differ by as much (C20), or a number of which there is no record decides alone (P1).
OPEN = {"C5", "C20", "C27", "H3", "H13", "H14", "H16", "P1"}


def ended(found, status="ok", message=""):
    return Outcome(status, found, 1.0, message, 0)


@pytest.fixture(scope="module")
def given():
    return sources.sources({name: ended(found) for name, found in FOUND.items()}, RUNS)


@pytest.fixture(scope="module")
def found(given):
    return facts.all_facts(given)


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


def fact(name, holds):
    return Fact(name, "", {True: 1.0, False: 0.0, None: None}[holds], ">=", 1.0)


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
    row = Row("C1", "x", "y", ("a",), ("b",), ("c",))
    known = {"a": fact("a", confirms), "b": fact("b", refutes), "c": fact("c", explains)}
    [one] = settle(known, [row])
    assert one.verdict == verdict
    assert bool(one.settles) == (verdict == "INCONCLUSIVE")


def test_a_side_holds_only_whole_and_not_asks_for_the_contrary():
    row = Row("C1", "x", "y", ("a", "not b"), ("not a",))
    for a, b, verdict in (
        (True, False, "CONFIRMED"),
        (True, True, "INCONCLUSIVE"),
        (True, None, "INCONCLUSIVE"),
        (False, None, "REFUTED"),
    ):
        assert settle({"a": fact("a", a), "b": fact("b", b)}, [row])[0].verdict == verdict


FACTORS = (0.0, 0.1, 0.5, 0.8, 0.9, 0.98, 1.02, 1.1, 1.25, 2.0, 10.0, 1e3)
STEPS = (-160, -2, -1, 1, 2, 3)


def changes(value, spoken):
    """`value` with a leaf changed, or numbers that stand together: moved, exchanged, left out."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value * factor for factor in FACTORS)
        yield from (value + step for step in STEPS)
    elif value is None:
        yield 1.0
        yield (1.0, 1.0)
    elif isinstance(value, str):
        yield from (other for other in spoken if other != value)
    elif isinstance(value, figures.Timing):
        yield from (replace(value, seconds=value.seconds * factor) for factor in FACTORS[1:])
    elif isinstance(value, dict):
        yield {}
        for one in value.values():
            yield from (dict.fromkeys(value, new) for new in (one, *changes(one, spoken)))
        yield from (value | {k: new} for k, one in value.items() for new in changes(one, spoken))
    elif isinstance(value, list | tuple):
        yield type(value)()
        if all(isinstance(one, figures.Timing) for one in value):  # of one cost an operation
            yield type(value)(replace(t, seconds=1e-5 * t.operations) for t in value)
        elif all(map(number, value)):
            yield from (type(value)(one * factor for one in value) for factor in FACTORS)
            yield from (type(value)([one] * len(value)) for one in value)
        for at, one in enumerate(value):
            yield type(value)((*value[:at], *value[at + 1 :]))
            for new in changes(one, spoken):
                yield type(value)((*value[:at], new, *value[at + 1 :]))


def number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def words(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (word for one in value.values() for word in words(one))
    elif isinstance(value, list | tuple):
        yield from (word for one in value for word in words(one))


def beyond(given, one, source, spoken, most=12):
    """The source with as few leaves changed as bring that fact across its limit, or None.

    Each change is the one that leads nearest to the limit, or across.
    """
    before, value = one.answer(given), given.found[source]
    nearest = abs(before.value - before.limit)
    for _ in range(most):
        best = None
        for changed in changes(value, spoken):
            now = one.answer(sources.Sources(given.found | {source: changed}))
            if now.value is None:
                continue
            if now.holds is not before.holds:
                return changed
            if abs(now.value - now.limit) < nearest:
                nearest, best = abs(now.value - now.limit), changed
        if best is None:
            return None
        value = best
    return None


@pytest.fixture(scope="module")
def flips(given, found):
    """By row, the facts that flip its verdict when a source is changed; and those sources.

    A figure, a trial's result or a kept run's number is moved across the limit of a fact that reads
    it; then all facts and verdicts that stand on it are computed anew.
    """
    asked = {one.name: one for one in facts.all_asked()}
    by_label = {given.label(source): source for source in given.found}
    readers, using = {}, {}
    for name, one in found.items():
        for label in one.evidence:
            readers.setdefault(by_label.get(label), []).append(name)
    for row in ROWS:
        for side in row.sides.values():
            for name in side:
                using.setdefault(name.removeprefix("not "), []).append(row)
    before, by_row, by_source = verdicts(found), {row.id: set() for row in ROWS}, set()
    for source in filter(None, readers):
        spoken = sorted({*words(given.found[source]), *figures.PARAMETERS, *figures.NAMED_MISSING})
        for name in readers[source]:
            changed = beyond(given, asked[name], source, spoken)
            if changed is None:
                continue
            other = sources.Sources(given.found | {source: changed}, given.lacking, given.labels)
            now = found | {reader: asked[reader].answer(other) for reader in readers[source]}
            for one in settle(now, using[name]):
                if one.verdict != before[one.row.id]:
                    by_row[one.row.id].add(name)
                    by_source.add(given.label(source))
    return by_row, by_source


def test_every_decided_row_falls_with_a_number(found, flips):
    by_row, _ = flips
    decided = [id for id, verdict in verdicts(found).items() if verdict != "INCONCLUSIVE"]
    assert set(verdicts(found)) - set(decided) == OPEN
    assert [id for id in decided if not by_row[id]] == []


def test_every_fact_of_a_decided_row_flips_a_verdict(found, flips):
    by_row, _ = flips
    used = {
        name.removeprefix("not ")
        for one in settle(found)
        if one.verdict != "INCONCLUSIVE"
        for names in one.row.sides.values()
        for name in names
    }
    assert sorted(used - set().union(*by_row.values())) == []


def test_every_figure_trial_and_run_that_a_fact_reads_flips_a_verdict(found, flips):
    _, by_source = flips
    read = {label for fact in found.values() for label in fact.evidence}
    assert sorted(read - by_source) == ["table:BUSY"]  # of H3: open


def test_a_stated_number_decides_nothing_alone_and_is_named_beside_others():
    stated = replace(fact("a", True), evidence=("table:RERUN", "trial:x"))
    measured = replace(fact("b", True), evidence=("table:MEMORY_MIB",))
    known = {"a": stated, "b": measured, "c": fact("c", False)}
    [alone] = settle(known, [Row("C1", "x", "y", ("a",), ("c",))])
    assert alone.verdict == "INCONCLUSIVE" and "stated" not in str(alone)
    assert alone.settles == "CONFIRMED by stated numbers alone, a"
    [both] = settle(known, [Row("C1", "x", "y", ("a", "b"), ("c",))])
    assert str(both) == "C1 CONFIRMED: x; stated, without a record: a"
    [none] = settle(known, [Row("C1", "x", "y", ("b",), ("c",))])
    assert str(none) == "C1 CONFIRMED: x"
    assert (stated.seen, measured.seen) == ("1 (>= 1 asked, stated)", "1 (>= 1 asked)")


def test_a_pace_that_plain_trials_differ_by_decides_nothing(given):
    run = given.found["run:step5"]
    assert sorted(run["plain"]) == [3, 3, 3, 4, 4, 4]
    asked = {one.name: one for one in facts.all_asked()}
    for plain, holds in ((run["plain"], False), ([4, 4, 4], True)):
        other = given.found | {"run:step5": run | {"plain": plain}}
        seen = sources.Sources(other, given.lacking, given.labels)
        assert asked["blocking-comes-less-far"].answer(seen).holds is holds


def test_a_verdict_needs_no_number_that_was_not_measured(found):
    assert [f.name for f in found.values() if f.value is None] == []
    assert all(fact.evidence for fact in found.values())


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_trial_decides_today_what_it_decided(given, found, name):
    now = sources.Sources(
        given.found | {f"trial:{name}": TRIALS[name]()}, given.lacking, given.labels
    )
    mine = [one for one in facts.all_asked() if f"trial:{name}" in found[one.name].evidence]
    assert mine
    assert {o.name: o.answer(now).holds for o in mine} == {
        o.name: found[o.name].holds for o in mine
    }


def test_every_trial_is_read_and_every_fact_used(found):
    read = {one for fact in found.values() for one in fact.evidence}
    assert {f"trial:{name}" for name in TRIALS} == {one for one in read if one[:5] == "trial"}
    sides = [names for row in ROWS for names in row.sides.values()]
    assert {name.removeprefix("not ") for names in sides for name in names} == set(found)
    assert set(FOUND) == set(TRIALS)


def test_a_fact_whose_trial_did_not_run_or_failed_says_why():
    late = {"state": ended(None, "timeout", "still running after 1 s")}
    known = facts.all_facts(sources.sources(late, RUNS))
    assert known["something-grows"].holds is None
    assert known["something-grows"].why == "trial:state: timeout, still running after 1 s"
    assert known["late-binding-is-wrong"].why == "trial:checkpointing: not there"
    one = next(one for one in settle(known) if one.row.id == "H9")
    assert one.verdict == "INCONCLUSIVE" and "still running" in one.settles


@pytest.mark.parametrize(
    ("source", "changed", "name", "why"),
    [
        ("MEMORY_MIB", None, "grows-as-square", "table:MEMORY_MIB: not there"),
        ("PER_LAYER", {}, "one-constant", "KeyError"),
        ("USED_GB", (2.4, 0.0), "memory-in-use", "ZeroDivisionError"),
        ("trial:graph", {"nodes": 3}, "graph-is-circular", "KeyError('back_edges')"),
        ("trial:operations", {"rows": []}, "syncs-by-the-token", "no row of loop at T 128"),
        ("run:step5", {"reached": {}}, "traced-comes-less-far", "KeyError"),
    ],
)
def test_a_source_that_is_missing_or_lacks_a_number_leaves_its_fact_open(
    given, source, changed, name, why
):
    left = {key: one for key, one in given.found.items() if key != source}
    if changed is not None:
        left[source] = changed
    known = facts.all_facts(sources.Sources(left, given.lacking, given.labels))
    assert known[name].holds is None and why in known[name].why
    row = next(one for one in settle(known) if name in one.facts)
    assert row.verdict == "INCONCLUSIVE" and why in row.settles


def test_a_kept_run_that_is_gone_or_lacks_the_row_leaves_its_facts_open(tmp_path):
    for runs, why in (
        ({}, "no run was named"),
        ({"step5": "03-x"}, "there are no runs in"),
        ({"step5": "01_memory_scaling-28623959"}, "makes no claim 'the same run comes further"),
    ):
        root = tmp_path if "no runs" in why else COMMITTED
        known = facts.all_facts(sources.sources({}, runs, root))
        assert known["deadline-moves"].holds is None and why in known["deadline-moves"].why
    with pytest.raises(ValueError, match="no fact reads a run as 'step6'; there are step5"):
        sources.sources({}, {"step6": "x"})


def test_two_versions_of_torch_decide_that_row_and_one_does_not(given, found, tmp_path):
    def row(torch, forward, apart):
        return {"torch": torch, "forward": forward, "backward": 100, "loss_apart": apart}

    (tmp_path / "2026-01-01").mkdir()
    for rows, verdict in (
        ([row("2.5.1", 100, 0.0), row("2.11.0", 102, 1e-6)], "REFUTED"),
        ([row("2.5.1", 120, 0.0), row("2.11.0", 100, 0.0)], "INCONCLUSIVE"),
        ([row("2.5.1", 100, 0.0), row("2.11.0", 202, 1e-6)], "CONFIRMED"),
        ([row("2.5.1", 100, 0.0), row("2.11.0", 102, 0.1)], "INCONCLUSIVE"),
        ([row("2.5.1", 100, 0.0), row("2.5.1", 100, 0.0)], "INCONCLUSIVE"),
    ):
        record = json.dumps({"designs": [{"settings": {}, "rows": rows}]})
        (tmp_path / "2026-01-01" / "versions-1.json").write_text(record)
        known = facts.all_facts(sources.sources({}, {"versions": "versions-1.json"}, tmp_path))
        assert (
            verdicts(found | {n: f for n, f in known.items() if n[:8] == "versions"})["H13"]
            == verdict
        )
    assert "not two versions" in known["versions-lose-alike"].why
    gone = facts.all_facts(sources.sources({}, {"versions": "versions-2.json"}, tmp_path))
    assert "no record 'versions-2.json'" in gone["versions-lose-alike"].why


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (Row("C1", "x", "y", ("no such",), ("b",)), "'no such', which is no fact"),
        (Row("C1", "x", "y", (), ("b",)), "names no facts that confirm it"),
        (Row("C1", "x", "y", ("b",)), "or none that do otherwise"),
    ],
)
def test_a_row_that_could_come_out_one_way_only_is_refused(row, complaint):
    with pytest.raises(ValueError, match=complaint):
        settle({"b": fact("b", True)}, [row])


@pytest.mark.parametrize("asked", ["1.0", "~ 1", "< many", "<1"])
def test_a_fact_without_a_limit_is_refused(asked):
    with pytest.raises(ValueError, match="a relation, a limit and perhaps a unit"):
        Asked("x", "", asked, lambda see: 1.0)


def test_a_value_has_functions_and_sources_and_no_builtins(given):
    def value(text):
        return facts.evaluated(compile(text, "x", "eval"), given.unread())

    assert value('max(BUSY["CPU"], run("step5")["by layers"][1] - 99)') == 1.04
    for text, name in (("open('x')", "open"), ("nonesuch", "nonesuch")):
        with pytest.raises(sources.Lacking, match=f"table:{name}: not there"):
            value(text)


def test_claims_carry_facts_with_their_limits_and_fail_when_contradicted(found):
    made = claims.all_claims(settle(found))
    assert len(made) == len(ROWS)
    assert all(claim.evidence["evidence"] for claim in made)
    assert json.dumps([claim.evidence for claim in made])
    told = made[6].evidence["facts"]["speed-is-66"]
    assert told[1:] == [False, "4.987 (<= 1.1 asked)"]
    row = Row("C1", "x", "y", ("a",), ("b",))
    both = settle({"a": fact("a", True), "b": fact("b", True)}, [row])
    assert [claim.verdict for claim in claims.all_claims(both)] == ["FAIL"]
    assert claims.fewer_undecided_than(both, 46).verdict == "FAIL"
    assert claims.fewer_undecided_than(settle(found), 65).verdict == "PASS"
    assert claims.fewer_undecided_than(settle(found), 0).verdict == "INCONCLUSIVE"


def test_a_stored_run_says_what_todays_rules_make_of_its_numbers():
    run = Run(COMMITTED / "2026-11-24/06_case_study_settlement-666a2464")
    of, calls = claims_of(run.folder)
    made = [call(of) for call in calls.values()]
    now = {claim.claim: claim.verdict for claim in made}
    assert {entry["claim"]: entry["verdict"] for entry in run.verdicts()} == now
    changed = [e for e in run.verdicts() if e["verdict"] != e.get("was", e["verdict"])]
    assert [claims.subject(e["claim"]) for e in changed] == ["C20", "H13", "P1", ""]
    assert all(e["said"] != e["claim"] for e in changed)


def test_what_is_refuted_explained_or_void_says_what_is_taken_back(found):
    for one in settle(found):
        if one.verdict in ("REFUTED", "EXPLAINED", "VOID"):
            assert one.row.retraction, one.row.id


def test_unknown_trials_are_refused():
    with pytest.raises(ValueError, match=r"no trial 'states'; there are print-schedule"):
        trials.run_all(["states"])


@pytest.mark.processes
@pytest.mark.full
def test_a_trial_runs_in_a_process_of_its_own_and_keeps_what_it_found(tmp_path):
    made = trials.run_all(["boolean-mask"], folder=tmp_path, progress=False)["boolean-mask"]
    assert made.status == "ok"
    [kept] = tmp_path.glob("*boolean-mask/result.json")
    assert json.loads(kept.read_text())["result"] == made.result


class Node:
    def __init__(self, *followers):
        self.next_functions = [(one, 0) for one in followers]


def test_an_edge_that_leads_back_is_found_and_a_shared_node_is_none():
    shared = Node()
    assert trials.back_edges(Node(Node(shared), Node(shared))) == 0
    first = Node()
    first.next_functions = [(Node(Node(), first), 0)]
    assert trials.back_edges(first) == 1


def test_what_the_graph_still_holds_is_counted():
    import torch

    from workbook.rooms.case_study.settlement.notes import _kept

    x = torch.ones(8, 8, requires_grad=True)
    assert _kept(lambda: x.exp()) == 8 * 8 * 4
    assert _kept(lambda: x.exp().argmax() * x.sum()) > _kept(lambda: x.detach().sum() * x.sum())


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


def test_figures_are_drawn_with_and_without_trials(found):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    cut = [plots.cut({"deadlines": ended(FOUND["deadlines"])}), plots.cut({})]
    for figure in (plots.memory(), plots.microseconds(), plots.verdicts(settle(found)), *cut):
        figure.canvas.draw()
        matplotlib.pyplot.close(figure)


def test_the_case_studys_figures_are_as_its_reports_have_them():
    for layers, (forward, backward, total) in figures.LAYER_SCALING_S.items():
        assert forward + backward == pytest.approx(total, abs=0.002), layers
    peaks, estimates = figures.MEMORY_MIB, figures.PUBLISHED_ESTIMATE_MB
    off = {t: round(100 * (mb / peaks[t] - 1), 1) for t, mb in estimates.items()}
    assert off == {128: -52.6, 512: -71.2, 1024: -54.2, 2048: 5.1}
    assert {t: first for t, (first, _) in figures.TABLES_MB.items()}.items() <= peaks.items()


def test_sentences_hold_no_numbers_that_move():
    """They are compared; what moves is a fact's value."""
    for one in facts.all_asked():
        assert not re.search(r"\d+\.\d+ s\b", one.sentence)


# nbval runs all of them, and compares what follows, with their notebook.
SOME = ["deadlines", "operations", "checkpointing", "one-query", "in-place", "fragmentation"]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("names", [SOME, pytest.param(["all"], marks=pytest.mark.long)])
def test_every_trial_decides_what_it_decided(names):
    """Those that ask for a GPU decline without one; times decide alike on any machine.

    On a busy one a trial that decided otherwise is made once more, with nothing of ours beside it.
    """
    made = trials.run_all(names, deadline_s=250, progress=False)
    assert {name for name, one in made.items() if one.status not in ("ok", "declined")} == set()
    stored = facts.all_facts(
        sources.sources({name: ended(found) for name, found in FOUND.items()}, RUNS)
    )

    def otherwise(made):
        known = facts.all_facts(sources.sources(made, RUNS))
        return [f for n, f in known.items() if f.holds not in (None, stored[n].holds)]

    again = {e.removeprefix("trial:") for f in otherwise(made) for e in f.evidence}
    if again := sorted(again & set(made)):
        made |= trials.run_all(again, workers=1, deadline_s=250, progress=False)
    assert [str(f) for f in otherwise(made)] == []
