"""Oracles of a training's course: what learns, how long a step takes, where the loss goes."""

import math

import healthy_subjects as healthy
import oracle_subjects as subjects
import pytest
import torch
from torch import nn

from workbook.lab import oracles
from workbook.lab.oracles import CHEAP, gradients, merge
from workbook.lab.oracles.duration import Duration
from workbook.lab.oracles.learning import digest


def asked(make, *names, steps=12):
    return merge({0: subjects.asked(make, *names, steps=steps)})


QUIET = {  # hints that are right: each says only what is so
    (healthy.Experts, "arrival"): "experts.1.weight",
    (healthy.Gan, "arrival"): "all zero in each of 60 steps: second.bias; no gradient for first.",
    (healthy.HeadOnly, "optimizers"): "4 of 6 parameters with a gradient are in no optimizer",
    (healthy.Longer, "duration"): "so does what the model is given",
}


@pytest.mark.parametrize("make", healthy.HEALTHY)
def test_no_sound_training_is_accused_and_hints_say_what_is_so(make):
    found = asked(make, *CHEAP, steps=60)
    # RSS is not this training's alone
    assert not {n: r for n, r in found.items() if r["ok"] is False and n != "memory"}
    hints = {name: result["hint"] for name, result in found.items() if "hint" in result}
    hints.pop("plateau", None)  # of random numbers a loss learns nothing
    for name, hint in hints.items():
        assert QUIET.get((make, name), "none") in hint


def test_a_parameter_that_no_optimizer_holds_is_named_with_their_number():
    found = asked(subjects.Forgotten, "optimizers")["optimizers"]
    assert (found["ok"], found["what"], found["place"]) == (False, "not-optimized", "scale.by")
    assert "1 of 5 parameters with a gradient are in no optimizer: scale.by" in found["detail"]


def test_an_optimizer_that_is_not_called_yet_holds_its_parameters():
    assert asked(subjects.TwoOptimizers, "optimizers")["optimizers"]["ok"]
    assert asked(subjects.NoOptimizer, "optimizers")["optimizers"]["ok"] is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (subjects.RateOfZero, "the learning rate of first.weight, first.bias was 0 in 12 steps"),
        (subjects.Rounded, "second.weight did not change in 12 steps, though they have a gradient"),
    ],
)
def test_what_has_a_gradient_and_does_not_change_is_a_hint(make, said):
    found = asked(make, "optimizers")["optimizers"]
    assert found["ok"] and said in found["hint"]


def test_nothing_is_said_of_rates_after_a_single_step():
    assert "hint" not in asked(healthy.WarmUp, "optimizers", steps=1)["optimizers"]


def test_rows_that_never_have_a_gradient_are_a_hint():
    found = asked(subjects.DeadHeads, "rows")["rows"]
    assert found["ok"] and "8 of 16 rows of first.weight (8 to 15)" in found["hint"]
    assert asked(subjects.DeadHeads, "rows", steps=3)["rows"]["ok"] is None


def test_a_digest_tells_any_other_value_and_order():
    x = torch.arange(3000, dtype=torch.bfloat16).reshape(3, 1000)
    same = x.clone()
    assert digest(x) == digest(same)
    same[2, 7] = torch.nextafter(same[2, 7], torch.tensor(9e9, dtype=torch.bfloat16))
    assert digest(x) != digest(same)
    assert digest(x) != digest(x.flip(0))
    assert digest(torch.zeros(0)) == 0
    assert digest(torch.ones(2, dtype=torch.complex64)) is None


def test_a_step_that_searches_an_ever_longer_list_is_slow_by_its_own_doing(monkeypatch):
    # 100 ns an item looked at: a shared processor's own clock is not steady enough for a test
    subject = subjects.Searches({})
    monkeypatch.setattr(Duration, "_used", lambda self: 1e-7 * subject.looked_at)
    found = asked(lambda settings: subject, "duration", steps=30)["duration"]
    assert (found["ok"], found["what"]) == (False, "growing"), found
    assert "of processor time more than the last" in found["detail"]


@pytest.mark.parametrize(
    ("seconds", "what"),
    [
        (lambda i: 0.010, None),
        (lambda i: 0.010 + 0.0005 * i, "growing"),
        (lambda i: 0.010 + 0.00005 * i, "hint"),
        (lambda i: 0.0001 + 0.00001 * i, None),  # below a millisecond in all
        (lambda i: 0.010 + 0.020 * (i % 10 == 9), None),  # evaluates now and then
        (lambda i: 0.010 if i < 25 else 0.020, None),  # once
        (lambda i: 1.0 if i < 8 else 0.010, None),  # compiles
        (lambda i: 0.010 + 0.010 * (7 * i % 11) / 11, None),  # lengths
        (lambda i: 0.010 + 0.0005 * min(i, 8), None),  # a cache that fills up
    ],
)
def test_only_growth_that_is_steady_and_large_is_named(monkeypatch, seconds, what):
    clock = [0.0]
    monkeypatch.setattr(Duration, "_used", lambda self: clock[0])
    seen = Duration(None)
    for i in range(40):
        seen.begin(i)
        clock[0] += seconds(i)
        seen.end(i, None)
    found = seen.result()
    assert (found["what"] or ("hint" if "hint" in found else None)) == what, found
    assert found["ok"] is (what != "growing")


def test_steps_that_grow_as_what_the_model_is_given_are_a_hint(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(Duration, "_used", lambda self: clock[0])
    model = nn.Linear(1, 1)
    seen = Duration(model)
    for i in range(40):
        seen.begin(i)
        model(torch.ones(1 + i, 1))
        clock[0] += 0.01 * (1 + i)
        seen.end(i, None)
    seen.close()
    found = seen.result()
    assert found["ok"] and found["hint"].endswith("so does what the model is given")


def test_too_few_steps_tell_nothing_of_growth():
    assert asked(subjects.Plain, "duration", steps=17)["duration"]["ok"] is None


def test_an_explosion_or_a_plateau_is_a_hint_and_a_fault_once_a_bound_is_stated():
    found = asked(subjects.Explodes, "explosion")["explosion"]
    assert found["ok"] and "above 10 x its first third since step" in found["hint"]
    found = asked(subjects.Explodes, "explosion:2")["explosion"]
    assert (found["ok"], found["what"]) == (False, "loss-explosion")
    assert "at most 2 was stated" in found["detail"]
    assert asked(subjects.Explodes, "explosion:1e9")["explosion"]["ok"]
    found = asked(subjects.Stays, "plateau", steps=60)["plateau"]
    assert found["ok"] and "from" in (found.get("hint") or found["detail"])
    found = asked(subjects.Stays, "plateau:0.5")["plateau"]
    assert (found["ok"], found["what"]) == (False, "loss-plateau")
    learns = asked(subjects.Learns, "plateau", "explosion", "plateau:9", steps=60)
    assert all(result["ok"] and "hint" not in result for result in learns.values())
    with pytest.raises(ValueError, match=r"'explosion:high' wants a number, as 'explosion:2\.5'"):
        oracles.check(["explosion:high"])


def test_a_gradient_that_is_missing_now_and_then_is_a_hint_and_one_that_stays_away_is_none():
    found = asked(healthy.Experts, "arrival", steps=4)["arrival"]  # the last expert never came
    assert found["ok"] and "experts.3.weight" not in found["detail"]
    assert asked(subjects.DetachedLate, "arrival", steps=4)["arrival"]["what"] == "missing-grad"
    assert asked(healthy.Averaged, "arrival", steps=1)["arrival"]["ok"] is False


def test_the_rank_whose_own_gradient_was_not_finite_is_to_blame_not_the_lowest(monkeypatch):
    monkeypatch.setattr(gradients, "several", lambda: True)
    culprit = subjects.asked(subjects.NotFinite, "finite")
    assert culprit["finite"]["at"] == 2
    assert "its own gradient of first.bias was not finite before" in culprit["finite"]["detail"]

    class Hears(subjects.Plain):  # what it has from others
        def step(self, i):
            self.optimizer.zero_grad()
            self.loss(i, torch.ones(2, subjects.SIZE)).backward()
            if i == 2:
                self.model["first"].bias.grad.fill_(math.nan)
            self.optimizer.step()

    witness = subjects.asked(Hears, "finite")
    assert witness["finite"]["ok"] is False and witness["finite"]["at"] == 2.5
    merged = merge({0: witness, 1: culprit, 2: witness})["finite"]
    assert merged["detail"].startswith("rank 1: step 2: 1 gradients are not finite")
    assert "at" not in merged
