import random
import sys

import pytest

from workbook.lab.search.thresholds import bayes, threshold

VALUES = list(range(1, 17))


@pytest.mark.parametrize("first", VALUES[1:])
def test_a_threshold_is_bracketed_in_few_trials_each_value_once(first):
    asked = []
    found = threshold(VALUES, lambda value: asked.append(value) or value >= first)
    assert (found.below, found.above) == (first - 1, first) and found.monotone
    assert len(set(asked)) == len(asked) <= 9
    assert str(found) == f"{first - 1} to {first}"


def test_a_fault_everywhere_or_nowhere_has_one_end():
    assert str(threshold(VALUES, lambda value: True)) == "from 1"
    assert str(threshold(VALUES, lambda value: False)) == "nowhere up to 16"


def test_values_may_shrink():
    found = threshold([64, 32, 16, 8], lambda value: value <= 16)
    assert (found.below, found.above) == (32, 16)


# Of the last 1 passes, 16 shows it, and a plain bisection stops at 2 to 3 without a look at 12.
@pytest.mark.parametrize("odd", [{8}, {1}, {1, 16}, set(range(5, 12)), set(range(3, 17)) - {12}])
def test_what_is_not_monotone_is_said_to_be(odd):
    found = threshold(VALUES, lambda value: value in odd)
    assert not found.monotone and str(found).startswith("no single threshold (1: ")


def test_what_is_unresolved_widens_the_bracket():
    found = threshold(VALUES, lambda value: None if value in (8, 9, 10) else value >= 10)
    assert (found.below, found.above) == (7, 11) and found.monotone


def test_one_value_has_no_threshold():
    with pytest.raises(ValueError, match="between two values"):
        threshold([1], lambda value: True)
    with pytest.raises(ValueError, match="two values and a trial"):
        bayes([1, 2], lambda value: True, trials=0)


def test_a_threshold_of_a_fault_that_fires_at_70_percent_is_right_in_95_of_100_searches():
    right, plain = 0, 0
    for seed in range(100):
        rng = random.Random(seed)
        first = rng.choice(VALUES)

        def test(value, rng=rng, first=first):
            return value >= first and rng.random() < 0.7

        found, bracket = bayes(VALUES, test, trials=20), threshold(VALUES, test)
        assert len(found.answers) <= 20
        right += found.value == first
        plain += bracket.above == first and bracket.monotone
    assert right >= 95 and plain <= 60  # a plain bisection would be wrong


def test_rates_and_a_bracket_come_with_the_threshold():
    rng = random.Random(3)
    found = bayes(VALUES, lambda value: value >= 9 and rng.random() < 0.7)
    assert found.value == 9 and found.probability > 0.9
    (fired, above), (stray, below) = found.rates
    assert 0 < fired <= above and stray == 0 < below
    low, high = found.bracket
    assert low <= 9 <= high
    assert sum(found.distribution) == pytest.approx(1)


def test_a_fault_that_never_fired_has_no_threshold():
    found = bayes(VALUES, lambda value: False, trials=12)
    assert found.value is None and found.bracket is None and len(found.answers) == 12
    assert found.rates == ((0, 0), (0, 12))


def test_an_unresolved_value_is_neither_asked_again_nor_ruled_out():
    found = bayes(VALUES, lambda value: None if value == 8 else value >= 8, trials=30)
    assert [value for value, _ in found.answers].count(8) <= 1
    low, high = found.bracket
    assert low <= 8 <= high or found.value == 9
    assert bayes([1, 2], lambda value: None).answers[2:] == []


def test_without_git_bayesect_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "git_bayesect", None)
    with pytest.raises(ValueError, match=r"needs git-bayesect; pip install 'nsa\[lab\]'"):
        bayes(VALUES, lambda value: True)
