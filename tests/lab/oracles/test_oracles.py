import gc
from types import SimpleNamespace

import numpy as np
import oracle_subjects as subjects
import pytest
import torch
from tiny_models import tiny
from torch import nn

from nsa.lab import oracles
from nsa.lab.oracles import CHEAP, Watch, merge
from nsa.lab.oracles.compare import exponent
from nsa.lab.oracles.growth import steady_slope
from nsa.model.data import synthetic
from nsa.model.llama import LanguageModel
from nsa.model.train import TrainConfig, Trainer


@pytest.fixture(autouse=True)
def collector():
    yield
    gc.enable()


def asked(make, *names, steps=4, settings=None, twice=False):
    """What the oracles say of a training; `twice`: they may make it anew."""
    settings = settings or {}
    subject = make(settings)
    remade = (lambda changes: make({**settings, **changes})) if twice else None
    with Watch(names, subject, settings) as seen:
        for i in range(steps):
            seen.begin(i)
            loss = subject.step(i)
            seen.end(i, loss)
            del loss
        return seen.results(remade)


def one(make, name, **how):
    (result,) = asked(make, name, **how).values()
    return result


def broken(make, name, what, **how):
    """What an oracle says that must find `what`."""
    result = one(make, name, **how)
    assert (result["ok"], result["what"]) == (False, what), result
    return result


def library(**changes):
    """Makes the library's own training of a tiny model."""

    def make(settings):
        model = LanguageModel(tiny(**changes))
        config = TrainConfig(batch=1, tokens=48, seed=0)
        trainer = Trainer(model, synthetic(0, 256), config)
        return SimpleNamespace(step=trainer.step, model=model)

    return make


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_sound_training_breaks_no_oracle(device):
    names = (*CHEAP, "checkpoint")
    found = asked(subjects.Plain, *names, steps=12, settings={"device": device}, twice=True)
    assert list(found) == list(names)
    assert not [name for name, result in found.items() if result["ok"] is False]
    merged = merge({0: found})
    assert all(result["ok"] for name, result in merged.items() if name != "memory"), merged


def test_losses_are_those_of_a_training_that_nobody_watches_and_every_hook_is_gone_afterwards():
    plain = subjects.Plain()
    alone = [plain.step(i).item() for i in range(4)]
    backward, frozen = torch.autograd.backward, gc.get_freeze_count()
    subject = subjects.Plain()
    with Watch(CHEAP, subject) as seen:
        watched = []
        for i in range(4):
            seen.begin(i)
            watched.append(subject.step(i).item())
            seen.end(i, None)
        assert torch.autograd.backward is not backward
    assert watched == alone
    assert torch.autograd.backward is backward
    assert gc.get_freeze_count() <= frozen
    assert not subject.model["first"].weight._post_accumulate_grad_hooks
    assert not subject.model._forward_hooks


GRADIENTS = {
    subjects.Detached: ("arrival", "missing-grad", "first.weight", "step 0: no gradient for 2"),
    subjects.DetachedLate: ("arrival", "missing-grad", "first.weight", "step 2: no gradient for 2"),
    subjects.TimesZero: ("arrival", "zero-grad", "first.", "all zero in each of 4 steps"),
    subjects.NotFinite: ("finite", "nan-grad", "first.bias", "step 2: 1 gradients are not finite"),
}


@pytest.mark.parametrize("make", GRADIENTS)
def test_a_gradient_that_is_missing_zero_or_not_finite_is_named(make):
    name, what, place, detail = GRADIENTS[make]
    result = broken(make, name, what)
    assert result["place"].startswith(place) and detail in result["detail"]


def test_what_the_loss_cannot_reach_is_told_from_what_did_not_arrive():
    assert "the loss does not reach first." in one(subjects.Detached, "arrival")["detail"]
    assert "reach" not in one(subjects.DetachedLate, "arrival")["detail"]


def test_a_gradient_that_is_zero_now_and_then_is_no_fault():
    assert one(subjects.ZeroAtFirst, "arrival")["ok"]
    assert one(subjects.ZeroAtFirst, "arrival", steps=1)["ok"] is None


def test_parameters_that_rightly_have_none_are_believed():
    class Told(subjects.Detached):
        without_gradient = frozenset({"first.weight", "first.bias"})

    assert one(Told, "arrival")["ok"]


def test_parameters_that_are_not_finite_at_the_end_are_named():
    class Spoilt(subjects.Plain):
        def after(self, i, loss):
            if i == 3:
                self.model["second"].weight.data.fill_(float("inf"))

    assert broken(Spoilt, "finite", "nan-parameter")["place"] == "second.weight"


def test_an_overflow_that_a_scaler_skips_is_no_fault():
    assert one(subjects.Scaled, "finite")["ok"]


def test_without_an_optimizer_arrivals_are_seen_and_values_are_said_to_be_gone():
    result = one(subjects.NoOptimizer, "arrival")
    assert result["ok"] and "their values were gone" in result["detail"]


def test_layers_of_a_deeper_model_have_the_same_place():
    result = broken(library(force_branch="win"), "arrival", "missing-grad", steps=1)
    assert result["place"].startswith("blocks.*.attention.")


def test_without_a_model_gradients_cannot_be_told_and_the_rest_can():
    def bare(settings):
        return SimpleNamespace(step=subjects.Plain().step)

    found = asked(bare, "arrival", "graph", "census", steps=9)
    assert found["arrival"]["ok"] is None and "no `model`" in found["arrival"]["detail"]
    assert found["graph"]["ok"] and found["census"]["ok"]


GROWTH = {
    subjects.Keeps: {"census": "tensor-list"},
    subjects.KeepsLosses: {"census": "graph-kept"},
    subjects.KeepsNumbers: {},
    subjects.KeepsCycles: {"census": "cycle"},
    subjects.CollectsCycles: {},
    subjects.OneAllocation: {},
    subjects.GrowingGraph: {"graph": "graph-growth", "census": "graph-kept"},
    subjects.VaryingGraph: {},
}


@pytest.mark.parametrize("make", GROWTH)
def test_what_is_kept_from_step_to_step_is_told_apart(make):
    found = asked(make, "graph", "census", steps=20)
    broken = {name: result["what"] for name, result in found.items() if result["ok"] is False}
    assert broken == GROWTH[make]
    assert all(result["ok"] is not None for result in found.values())


@pytest.mark.parametrize("name", ["graph", "census", "memory", "recompilations"])
def test_one_step_does_not_tell_growth_from_warming_up(name):
    result = one(subjects.KeepsLosses, name, steps=1)
    assert result["ok"] is None and "too few steps" in result["detail"]


def test_memory_that_grows_by_2_mib_a_step_is_a_leak():
    class Keeps(subjects.Keeps):
        def kept(self, i, loss):
            return torch.full((2**19,), float(i))

    broken(Keeps, "memory", "host-leak", steps=24)


@pytest.mark.gpu
def test_on_a_device_a_quarter_of_a_mib_a_step_is_a_leak_and_nothing_is_none():
    how = {"steps": 12, "settings": {"device": "cuda"}}
    broken(subjects.Keeps, "memory", "device-leak", **how)
    assert one(subjects.Plain, "memory", **how)["ok"]


@pytest.mark.gpu
def test_on_a_device_a_quadratic_buffer_is_found_by_the_peak():
    settings = {"tokens": 1024, "dense": True, "device": "cuda"}
    broken(subjects.Tokens, "quadratic", "quadratic", settings=settings, twice=True)
    settings["dense"] = False
    assert one(subjects.Tokens, "quadratic", settings=settings, twice=True)["ok"]


def test_long_trainings_are_sampled_and_still_judged():
    broken(subjects.GrowingGraph, "graph", "graph-growth", steps=150)


def test_steps_that_compile_each_time_are_named_and_compiling_in_the_first_is_no_fault(monkeypatch):
    count = "nsa.lab.measure.counting._graphs"
    always, once = iter(range(0, 1000, 3)), iter([0, 40] + [40] * 20)
    monkeypatch.setattr(count, lambda: next(always))
    broken(subjects.Plain, "recompilations", "recompile", steps=6)
    monkeypatch.setattr(count, lambda: next(once))
    assert one(subjects.Plain, "recompilations", steps=6)["ok"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_that_differs_is_found_by_switching_it_off(reentrant):
    settings = {"reentrant": reentrant, "spoilt": True}
    how = {"settings": settings, "twice": True}
    result = broken(subjects.Recomputed, "checkpoint", "checkpoint-mismatch", **how)
    assert result["place"].startswith("first.")
    settings["spoilt"] = False
    sound = one(subjects.Recomputed, "checkpoint", **how)
    assert sound["ok"] and "1 checkpoints" in sound["detail"]


def test_checkpointing_is_as_it_was_afterwards():
    from torch.utils import checkpoint

    names = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")
    before = [getattr(checkpoint, name) for name in names]
    one(subjects.Recomputed, "checkpoint", twice=True)
    assert [getattr(checkpoint, name) for name in names] == before


def test_what_differs_from_itself_tells_nothing():
    result = one(subjects.Random, "checkpoint", twice=True)
    assert result["ok"] is None and "two equal runs differ" in result["detail"]


def test_the_models_own_checkpointing_has_the_gradients_of_none():
    result = one(library(checkpoint="all"), "checkpoint", steps=1, twice=True)
    assert result["ok"] and "2 checkpoints" in result["detail"]


def test_another_backend_has_the_same_gradients_or_is_named():
    how = {"settings": {"backend": "plain"}, "twice": True}
    assert one(subjects.Ways, "backends:written out", **how)["ok"]
    broken(subjects.Ways, "backends:wrong", "backend-mismatch", **how)
    broken(subjects.Ways, "backends:backend=wrong", "backend-mismatch", **how)
    assert one(subjects.Ways, "backends:plain", **how)["ok"] is None


def test_a_quadratic_buffer_is_named_with_its_module():
    settings = {"tokens": 128, "dense": True}
    how = {"settings": settings, "twice": True}
    assert broken(subjects.Tokens, "quadratic:tokens", "quadratic", **how)["place"] == "first"
    settings["dense"] = False
    sound = one(subjects.Tokens, "quadratic", **how)
    assert sound["ok"] and "to the 1.00" in sound["detail"]
    unset = one(subjects.Plain, "quadratic", twice=True)
    assert unset["ok"] is None and "is None" in unset["detail"]


def test_an_oracle_that_breaks_off_is_no_fault_of_the_training():
    def raises(changes):
        raise RuntimeError("no second time")

    subject = subjects.Recomputed({})
    with Watch(["checkpoint"], subject) as seen:
        result = seen.results(raises)["checkpoint"]
    assert result["ok"] is None and "broke off: RuntimeError: no second time" in result["detail"]
    with Watch(["checkpoint", "quadratic"], subject) as seen:
        assert {r["ok"] for r in seen.results().values()} == {None}


def test_the_ranks_lists_are_compared_and_the_rank_is_named():
    same = asked(subjects.Plain, "ranks", "arrival")
    assert merge({0: same, 1: same})["ranks"]["ok"]
    other = asked(subjects.Detached, "ranks", "arrival")
    merged = merge({0: same, 1: other})
    assert (merged["ranks"]["ok"], merged["ranks"]["what"]) == (False, "ranks-differ")
    assert "step 0: missing on rank 1 alone: first.bias, first.weight" in merged["ranks"]["detail"]
    assert merged["arrival"]["ok"] is False
    assert merged["arrival"]["detail"].startswith("rank 1: step 0: no gradient")
    assert merge({0: same, 1: {}})["ranks"]["ok"]
    assert "arrivals" not in merged["ranks"]


def test_what_no_rank_can_tell_is_not_told():
    silent = asked(lambda settings: SimpleNamespace(step=lambda i: None), "ranks")
    assert merge({0: silent, 1: silent})["ranks"]["ok"] is None
    assert merge({}) == {}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["arival"], "no oracle 'arival'; the nearest is 'arrival'"),
        (["xyz"], "no oracle 'xyz'; known are arrival, finite"),
        (["backends"], "compares with another: 'backends:sequential'"),
        (["graph:3"], "oracle 'graph' takes nothing after a colon, got '3'"),
    ],
)
def test_an_oracle_that_there_is_not_is_refused(names, message):
    with pytest.raises(ValueError, match=message):
        oracles.check(names)


def test_all_oracles_can_be_named():
    oracles.check([name for name in oracles.ORACLES if name != "backends"])
    assert set(CHEAP) | set(oracles.ANEW) == set(oracles.ORACLES)
    assert isinstance(oracles.Watch([], nn.Linear(1, 1)).results(), dict)


def test_a_slope_is_that_of_steady_growth_only():
    steps = list(range(30))
    noise = np.random.default_rng(0).normal(0, 0.5, 30)
    assert steady_slope(steps, [2.0 * s for s in steps]) == pytest.approx(2)
    assert steady_slope(steps, [2.0 * s + n for s, n in zip(steps, noise, strict=True)]) > 1.8
    once = [100.0 * (s >= 15) for s in steps]
    assert steady_slope(steps, once) == 0
    assert np.polyfit(steps, once, 1)[0] > 3  # what a line of least squares calls a leak
    assert steady_slope(steps, [100.0 * (s < 8) + s / 1e9 for s in steps]) < 0.1
    assert steady_slope(steps, [s % 4 for s in steps]) <= 0
    assert steady_slope(steps, list(noise)) < 0.02
    assert steady_slope([0, 1, 2, 3, 4], [1, 2, 3, 4, 5]) == 1
    assert steady_slope([0, 1, 2], [1, 2, 3]) is None
    assert steady_slope(steps, [float("nan")] * 30) is None
    with pytest.raises(ValueError, match="2 steps with 1 values"):
        steady_slope([0, 1], [0])


def test_an_exponent_minds_no_constant():
    assert exponent(5 + 1, 5 + 4, 5 + 16) == pytest.approx(2)
    assert exponent(5 + 1, 5 + 2, 5 + 4) == pytest.approx(1)
    assert exponent(3, 3, 3) is None
