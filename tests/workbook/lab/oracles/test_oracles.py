import gc
from types import SimpleNamespace

import numpy as np
import oracle_subjects as subjects
import pytest
import torch
from oracle_subjects import asked
from tiny_models import tiny
from torch import nn

from nsa.model.data import synthetic
from nsa.model.llama import LanguageModel
from nsa.model.train import TrainConfig, Trainer
from workbook.lab import oracles
from workbook.lab.oracles import CHEAP, Watch, merge
from workbook.lab.oracles.compare import exponent
from workbook.lab.oracles.growth import steady_slope


@pytest.fixture(autouse=True)
def collector():
    yield
    gc.enable()


def case(make, name, what, said="", steps=4, **settings):
    """Finding of oracle `name`, "" for nothing and None where it cannot tell, and a part of
    "place: detail"."""
    marks = [pytest.mark.gpu] if settings.get("device") == "cuda" else []
    return pytest.param(make, name, what, said, steps, settings, marks=marks)


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
    short = ("memory", "duration", "plateau")  # the last two want more steps
    assert all(result["ok"] for name, result in merged.items() if name not in short), merged


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
    assert not subject.model._forward_hooks and not subject.model._forward_pre_hooks


UNREACHED = "first.weight: step 0: no gradient for 2 parameters: the loss does not reach first."
LATE = "first.weight: step 2: no gradient for 2 parameters first."
INFINITE = "first.bias: step 2: 1 gradients are not finite"
SPOILT = ("checkpoint", "checkpoint-mismatch", "first.")


@pytest.mark.parametrize(
    ("make", "name", "what", "said", "steps", "settings"),
    [
        case(subjects.Detached, "arrival", "missing-grad", UNREACHED),
        case(subjects.DetachedLate, "arrival", "missing-grad", LATE),
        case(subjects.Expected, "arrival", ""),
        case(subjects.TimesZero, "arrival", "zero-grad", "all zero in each of 4 steps: first."),
        case(subjects.ZeroAtFirst, "arrival", ""),
        case(subjects.ZeroAtFirst, "arrival", None, "zero in the only step", steps=1),
        case(subjects.NoOptimizer, "arrival", "", "their values were gone"),
        case(library(force_branch="win"), "arrival", "missing-grad", "blocks.*.attention.", 1),
        case(subjects.NotFinite, "finite", "nan-grad", INFINITE),
        case(subjects.Spoilt, "finite", "nan-parameter", "second.weight:"),
        # growth, told from warming up
        case(subjects.KeepsLosses, "graph", None, "too few steps", steps=1),
        case(subjects.KeepsLosses, "census", None, "too few steps", steps=1),
        case(subjects.KeepsLosses, "memory", None, "too few steps", steps=1),
        case(subjects.KeepsLosses, "recompilations", None, "too few steps", steps=1),
        case(subjects.GrowingGraph, "graph", "graph-growth", steps=150),  # is sampled
        case(subjects.KeepsMuch, "memory", "host-leak", steps=24),
        case(subjects.Keeps, "memory", "device-leak", steps=12, device="cuda"),
        case(subjects.Plain, "memory", "", steps=12, device="cuda"),
        # another way to the same, and a longer one
        case(subjects.Recomputed, *SPOILT, spoilt=True),
        case(subjects.Recomputed, *SPOILT, spoilt=True, reentrant=True),
        case(subjects.Recomputed, "checkpoint", "", "1 checkpoints"),
        case(subjects.Recomputed, "checkpoint", "", "1 checkpoints", reentrant=True),
        case(subjects.Random, "checkpoint", None, "two equal runs differ"),
        case(library(checkpoint="all"), "checkpoint", "", "2 checkpoints", steps=1),
        case(subjects.Ways, "backends:written out", "", backend="plain"),
        case(subjects.Ways, "backends:wrong", "backend-mismatch", backend="plain"),
        case(subjects.Ways, "backends:backend=wrong", "backend-mismatch", backend="plain"),
        case(subjects.Ways, "backends:plain", None, backend="plain"),
        case(subjects.Tokens, "quadratic:tokens", "quadratic", "first:", tokens=128, dense=True),
        case(subjects.Tokens, "quadratic", "", "to the 1.00", tokens=128, dense=False),
        case(subjects.Plain, "quadratic", None, "is None"),
        case(subjects.Tokens, "quadratic", "quadratic", tokens=1024, dense=True, device="cuda"),
        case(subjects.Tokens, "quadratic", "", tokens=1024, dense=False, device="cuda"),
    ],
)
def test_a_fault_is_named_with_its_place_and_what_is_right_is_not(
    make, name, what, said, steps, settings
):
    (result,) = asked(make, name, steps=steps, settings=settings, twice=True).values()
    assert (result["ok"], result["what"]) == (None if what is None else not what, what or "")
    assert said in f"{result['place']}: {result['detail']}"


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


@pytest.mark.parametrize(
    ("counts", "what"), [(range(0, 1000, 3), "recompile"), ([0] + [40] * 20, "")]
)
def test_steps_that_compile_each_time_are_named_and_compiling_in_the_first_is_no_fault(
    monkeypatch, counts, what
):
    counts = iter(counts)
    monkeypatch.setattr("workbook.lab.measure.counting._graphs", lambda: next(counts))
    found = asked(subjects.Plain, "recompilations", steps=6)["recompilations"]
    assert (found["ok"], found["what"]) == (not what, what)


def test_checkpointing_is_as_it_was_afterwards():
    from torch.utils import checkpoint

    names = ("_checkpoint_without_reentrant_generator", "CheckpointFunction")
    before = [getattr(checkpoint, name) for name in names]
    asked(subjects.Recomputed, "checkpoint", twice=True)
    assert [getattr(checkpoint, name) for name in names] == before


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
