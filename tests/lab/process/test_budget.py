import math
import time

import pytest

from nsa.lab.process.budget import RUN_ENDS, Budget


def test_trials_share_it_and_have_no_more_than_their_deadline():
    budget = Budget(100)
    assert budget.share(30) == 30
    assert budget.share(300) == pytest.approx(100, abs=1)
    assert Budget().share(1e9) == 1e9
    assert Budget(0).share(30) <= 0


def test_what_a_budget_cuts_short_was_not_tried():
    budget = Budget(100)
    assert budget.judged("timeout", "late", 40.0, 60.0) == (
        "not run", "the budget of 100 s was used up after 40 s of this one"
    )  # fmt: skip
    assert budget.judged("timeout", "late", 60.0, 60.0) == ("timeout", "late")
    assert budget.judged("error", "bad", 40.0, 60.0) == ("error", "bad")


@pytest.mark.parametrize(("left_s", "most_s"), [(1000, 900), (100, 80), (15, 0), (-5, 0)])
def test_a_run_that_will_be_ended_keeps_time_to_judge(monkeypatch, left_s, most_s):
    monkeypatch.setenv(RUN_ENDS, str(time.monotonic() + left_s))
    for budget in (Budget(), Budget(3600)):
        assert budget.share(math.inf) == pytest.approx(most_s, abs=1)
        assert budget.used_up == f"the {most_s} s that the run's timeout left for this were used up"


def test_a_budget_within_what_the_run_has_left_is_kept(monkeypatch):
    monkeypatch.setenv(RUN_ENDS, str(time.monotonic() + 1000))
    budget = Budget(300)
    assert budget.share(math.inf) == pytest.approx(300, abs=1)
    assert budget.used_up == "the budget of 300 s was used up"
