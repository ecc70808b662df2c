import random
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from math import prod
from unittest.mock import Mock

import pytest

from workbook.lab.search import covering
from workbook.lab.search.bisection import Bisection, Spent, Tried, is_fault
from workbook.lab.search.candidates import Candidates, ordered, position, table, text

NAMES = [f"f{number}" for number in range(11)]
SWITCHES = {name: [False, True] for name in NAMES}
# 138,240 combinations
MIXED = {
    name: list(range(count)) if count > 2 else [False, True]
    for name, count in zip(NAMES, (4, 6, 5, 4, 3, 2, 2, 2, 3, 2, 2), strict=True)
}
PASS, FAULT = Tried("PASS"), Tried("HANG", "HANG:lock at step", what="lock")


def planted(*conditions, fault=FAULT):
    """Judges a cell by a fault that shows where all the conditions hold."""
    return lambda cell, attempt: fault if all(holds(cell) for holds in conditions) else PASS


def has(name, value=True):
    return lambda cell: cell[name] == value


def covered(cells, names, strength):
    return {
        tuple((name, cell[name]) for name in chosen)
        for cell in cells
        for chosen in combinations(names, strength)
    }


@pytest.mark.parametrize(
    ("factors", "strength", "least", "most"),
    [(SWITCHES, 2, 1, 8), (SWITCHES, 3, 1, 24), (MIXED, 2, 32, 32),
     # a third of these triples the library leaves out
     ({name: [0, 1, 2] for name in "abc"}, 3, 27, 27)],
)  # fmt: skip
def test_a_screen_is_small_and_has_every_combination(factors, strength, least, most):
    cells = list(covering.cover(factors, strength=strength))
    assert least <= len(cells) <= most
    wanted = sum(
        prod(len(factors[name]) for name in chosen) for chosen in combinations(factors, strength)
    )
    assert len(covered(cells, factors, strength)) == wanted


def test_what_is_tested_is_not_screened_again():
    tested = [{"a": 1, "b": 1}, {"a": 2, "b": 2}]
    cells = list(covering.cover({"a": [1, 2], "b": [1, 2]}, tested=tested))
    assert sorted(tuple(c.values()) for c in cells) == [(1, 2), (2, 1)]


def test_a_screen_keeps_to_what_is_legal_and_still_has_all_that_can_be():
    def legal(part):
        both = part.get("f0") and part.get("f1")
        return not both and not (part.get("f2") and part.get("f3") is False)

    cells = list(covering.cover(SWITCHES, legal=legal))
    assert all(legal(cell) for cell in cells)
    # f2 wants f3: a pair with f2 and f3=False cannot be, all others can
    pairs = product(combinations(NAMES, 2), product([False, True], repeat=2))
    possible = {tuple(zip(names, values, strict=True)) for names, values in pairs}
    assert covered(cells, NAMES, 2) == {pair for pair in possible if legal(dict(pair))}


def test_one_factor_is_screened_by_value_and_equal_values_or_lists_are_kept_apart():
    assert list(covering.cover({"a": [3, 1, 2]})) == [{"a": 3}, {"a": 1}, {"a": 2}]
    assert len(list(covering.cover({"a": [1, True], "b": [[1], [2]]}))) == 4


def test_without_allpairspy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "allpairspy", None)
    with pytest.raises(ValueError, match=r"needs allpairspy; pip install 'nsa\[lab\]'"):
        list(covering.cover(SWITCHES))


@pytest.mark.parametrize(("size", "most"), [(1, 10), (2, 17), (3, 22)])
def test_ddmin_finds_every_set_in_few_questions(size, most):
    for wanted in combinations(range(11), size):
        asked = Counter()

        def test(part, wanted=wanted, asked=asked):
            asked[tuple(part)] += 1
            return set(wanted) <= set(part)

        assert covering.ddmin(range(11), test) == list(wanted)
        assert max(asked.values()) == 1 and len(asked) <= most


def test_ddmin_of_what_needs_nothing_is_empty():
    assert covering.ddmin(["a", "b"], lambda part: True) == []
    assert covering.ddmin([], lambda part: True) == []


def test_ddmin_refuses_differences_that_do_not_show_it():
    with pytest.raises(ValueError, match=r"2 difference\(s\) together do not show the fault"):
        covering.ddmin(["a", "b"], lambda part: None)


@pytest.mark.parametrize(
    "test",
    [  # c hides what a and b cause, unless d is there as well; what is unresolved is no fault
        lambda part: {"a", "b"} <= set(part) and ("c" not in part or "d" in part),
        lambda part: None if len(part) == 2 else {"a", "d"} <= set(part),
    ],
)
def test_ddmin_leaves_out_nothing_that_is_needed_where_a_difference_hides_the_fault(test):
    found = covering.ddmin(list("abcd"), test)
    assert test(found) is True
    assert not any(test([x for x in found if x != one]) for one in found)


def test_only_the_same_kind_and_signature_is_the_same_fault():
    assert covering.same(FAULT, Tried("HANG", "HANG:lock at step")) is True
    for found in (PASS, Tried("SLOW", "SLOW")):
        assert covering.same(FAULT, found) is False
    others = [("HANG", "HANG:collective at step"), ("OOM", "OOM:device"), ("INCONCLUSIVE",)]
    assert [covering.same(FAULT, Tried(*told)) for told in others] == [None] * 3


def test_a_stall_is_a_fault_of_its_own_that_what_moves_does_not_have():
    stalled = Tried("STALLED", "STALLED:socket at load", what="socket")
    assert is_fault(stalled) and is_fault(stalled, "STALLED") and not is_fault(stalled, "HANG")
    assert covering.same(stalled, replace(stalled)) is True
    for moves in (PASS, Tried("SLOW", "SLOW"), Tried("SLOW", "SLOW:uncounted at load")):
        assert covering.same(stalled, moves) is False
    for other in (FAULT, Tried("STALLED", "STALLED:file lock at load"), Tried("INCONCLUSIVE")):
        assert covering.same(stalled, other) is None


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_planted_set_among_11_factors_is_found_in_at_most_40_trials(size):
    for wanted in combinations(NAMES, size):
        found = Bisection(SWITCHES, planted(*map(has, wanted))).find()
        assert found.cause == dict.fromkeys(wanted, True), wanted
        assert found.finished and len(found.rows) <= 40
        assert set(found.instead.values()) == {False}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sets_of_thresholds_are_found_among_138240_combinations(size):
    rng = random.Random(size)
    for _ in range(10):
        wanted = {n: rng.randrange(1, len(MIXED[n])) for n in rng.sample(NAMES, size)}
        conditions = [lambda cell, n=n, v=v: cell[n] >= v for n, v in wanted.items()]
        found = Bisection(MIXED, planted(*conditions)).find()
        assert set(found.cause) == set(wanted) and len(found.rows) <= 40
        for name, bracket in found.brackets.items():
            assert (bracket.below, bracket.above) == (wanted[name] - 1, wanted[name])


@pytest.mark.parametrize(("size", "times", "from_seen"), [(1, 10, 0), (2, 10, 0), (3, 40, 1)])
def test_sets_of_single_values_are_found_three_of_them_from_where_they_were_seen(
    size, times, from_seen
):
    """A run that hangs beside one that does not, among 138,240 combinations; a new screen of pairs
    finds 7 in 10 of three values within 40 trials."""
    rng = random.Random(size)
    for _ in range(times):
        wanted = {n: rng.choice(MIXED[n][1:]) for n in rng.sample(NAMES, size)}
        seen = {n: rng.choice(values) for n, values in MIXED.items()} | wanted if from_seen else {}
        judge = planted(*(has(n, v) for n, v in wanted.items()))
        found = Bisection(MIXED, judge, seen=seen).find()
        assert found.cause == wanted and found.finished and len(found.rows) <= 40


def test_what_was_seen_and_does_not_show_it_again_costs_one_trial():
    plain = Bisection(SWITCHES, planted(has("f2"), has("f7"))).find()
    found = Bisection(SWITCHES, planted(has("f2"), has("f7")), seen={"f2": True}).find()
    assert found.cause == plain.cause == {"f2": True, "f7": True}
    assert found.rows[1].hypothesis == "what was seen shows it again"
    assert len(found.rows) <= len(plain.rows) + 1


@pytest.mark.parametrize(
    ("factors", "conditions", "cause"),
    [
        (SWITCHES, [has("f2"), has("f7", False)], {"f2": True, "f7": False}),
        (SWITCHES, [has("f3", False)], {"f3": False}),
        ({"a": [1, True, 1.0], "b": [False, True]}, [lambda cell: cell["a"] is True, has("b")],
         {"a": True, "b": True}),
    ],
)  # fmt: skip
def test_defaults_that_take_part_and_values_that_python_calls_equal_are_found(
    factors, conditions, cause
):
    found = Bisection(factors, planted(*conditions)).find()
    assert found.cause == cause and found.instead.keys() == cause.keys()
    for name, value in cause.items():
        assert found.cause[name] is value and found.instead[name] is not value


def test_a_fault_whatever_the_factors_are_has_an_empty_cause():
    found = Bisection({"a": [1, 2], "b": [1, 2, 3]}, planted()).find()
    assert found.cause == {} and found.solved
    assert str(found) == "HANG:lock whatever the factors are"


def test_a_fault_that_nothing_passed_beside_has_no_cause():
    def run(cell, attempt):
        return FAULT if cell["a"] == 1 else Tried("INCONCLUSIVE")

    found = Bisection({"a": [1, 2], "b": [1, 2]}, run).find()
    assert found.cause is None and "there is nothing to compare" in found.why


def test_no_fault_is_said_only_after_every_pair():
    found = Bisection({"a": [1, 2], "b": [1, 2, 3]}, lambda cell, attempt: PASS).find()
    assert found.cause is None and not found.solved
    assert found.why == "no fault in 6 trials: every combination of up to 3 factors was run"


def test_another_fault_neither_stops_nor_misleads_the_search():
    oom = Tried("OOM", "OOM:device", what="device")

    def run(cell, attempt):
        if cell["f5"] and cell["f6"]:
            return oom
        return FAULT if cell["f1"] and cell["f9"] else PASS

    found = Bisection(SWITCHES, run, kind="HANG", whole_screen=True).find()
    assert found.cause == {"f1": True, "f9": True} and found.others == [oom]
    assert "nothing: another verdict hides it" in {row.eliminated for row in found.rows}


def test_what_could_not_be_judged_is_run_once_more():
    said = Counter()

    def run(cell, attempt):
        said[tuple(cell.values())] += 1
        if cell["a"] and said[tuple(cell.values())] == 1:
            return Tried("INCONCLUSIVE", what="preflight")
        return FAULT if cell["a"] else PASS

    found = Bisection({"a": [False, True], "b": [False, True]}, run).find()
    assert found.cause == {"a": True} and max(said.values()) == 2


def test_what_is_not_legal_is_never_run():
    def legal(part):
        return not (part.get("f0") and part.get("f1"))

    def run(cell, attempt):
        assert legal(cell)
        return FAULT if cell["f0"] and cell["f4"] else PASS

    assert Bisection(SWITCHES, run, legal=legal).find().cause == {"f0": True, "f4": True}


def test_a_fault_that_fires_often_is_found_with_several_attempts():
    right = 0
    for seed in range(20):
        rng = random.Random(seed)
        fires = planted(has("f2"), has("f8"), lambda cell, rng=rng: rng.random() < 0.7)
        found = Bisection(SWITCHES, fires, attempts=4, most=100).find()
        right += found.cause == {"f2": True, "f8": True}
    assert right >= 18


def test_spent_trials_leave_what_was_found():
    found = Bisection(SWITCHES, planted(has("f1"), has("f2")), most=5).find()
    assert not found.solved and len(found.rows) == 5
    assert found.why == "not at its end: 5 trials are spent"


def test_spent_time_ends_a_search_that_keeps_its_rows():
    trials = Mock(side_effect=[PASS, FAULT, Spent("the budget of 60 s is spent")])
    found = Bisection(SWITCHES, trials).find()
    assert len(found.rows) == 2 and "60 s" in found.why


def test_a_whole_screen_runs_every_pair_before_it_narrows():
    found = Bisection(SWITCHES, planted(has("f1")), whole_screen=True).find()
    assert found.cause == {"f1": True}
    cells = [row.cell for row in found.rows]
    assert len(covered(cells, NAMES, 2)) == 4 * len(list(combinations(NAMES, 2)))


def test_the_ledger_says_what_each_trial_left():
    found = Bisection(SWITCHES, planted(has("f1"), has("f4"))).find()
    rows = table(found.rows)
    assert rows[0]["changed"] == "(the defaults)" and rows[0]["eliminated"] == ""
    lefts = [row["left"] for row in rows if row["left"] is not None]
    assert lefts == sorted(lefts, reverse=True) and lefts[-1] < lefts[0]
    assert rows[-1]["eliminated"].endswith("causes")
    lines = text(rows).splitlines()
    assert len(lines) == len(rows) + 1 and lines[0].startswith("number  trial")
    assert str(found) == "HANG:lock is caused by f1=true with f4=true"


def test_two_causes_are_said_to_be_more_than_one():
    run = planted(lambda cell: cell["a"] or cell["b"])
    found = Bisection({n: [False, True] for n in "abc"}, run, whole_screen=True).find()
    assert found.cause in ({"a": True}, {"b": True})
    assert any("there are several" in row.eliminated for row in found.rows)


@pytest.mark.parametrize(
    ("factors", "more", "message"),
    [
        ({}, {}, "needs factors with two values"),
        ({"a": [1]}, {}, "needs factors with two values"),
        ({"a": [1, 2]}, {"seen": {"a": 3}}, "3 is none of"),
        ({"a": [1, 2]}, {"seen": {"b": 3}}, "3 is none of"),
        ({"a": [1, 2]}, {"legal": lambda part: False}, "the base itself is not legal"),
    ],
)
def test_a_bisection_of_nothing_is_refused(factors, more, message):
    with pytest.raises(ValueError, match=message):
        Bisection(factors, planted(), **more)


def test_candidates_are_counted_and_refuted():
    left = Candidates({"a": [0, 1], "b": [0, 1]})
    assert len(left) == 1 + 4 + 4
    noted = [((1, 1), True, 4), ((1, 0), None, 4), ((0, 1), False, 2), ((1, 0), True, 1)]
    for (a, b), answer, count in noted:  # what is left: a = 1, with b = 1 or without
        left.note({"a": a, "b": b}, answer)
        assert len(left) == count


def test_numbers_in_order_have_thresholds_among_the_candidates():
    left = Candidates({"layers": [1, 2, 4, 6]})
    for layers, answer in ((1, False), (2, False), (4, True), (6, True)):
        left.note({"layers": layers}, answer)
    assert len(left) == 1  # layers >= 4


def test_a_space_too_large_is_kept_account_of_in_smaller_sets():
    many = Candidates({f"f{number}": list(range(12)) for number in range(30)})
    assert 400_000 < len(many) < 2_000_000


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 2, 4], True), ([4, 2.0, 1], True), ([1, 3, 2], False), ([1], False), ([1, 1], False),
     ([False, True], False), (["a", "b"], False), ([None, 1], False)],
)  # fmt: skip
def test_order_is_that_of_numbers_alone(values, expected):
    assert ordered(values) is expected


def test_true_is_not_one():
    assert position([True, 1], 1) == 1
    with pytest.raises(ValueError, match="0 is none of"):
        position([False], 0)
