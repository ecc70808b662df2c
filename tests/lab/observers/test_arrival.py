from types import SimpleNamespace

import pytest
import torch
from observed import trainer
from tiny_models import tiny
from torch import nn
from torch.utils.checkpoint import checkpoint

from nsa.lab.observers.arrival import GradientArrival, compare, summary
from nsa.lab.observers.deferred import Deferred
from nsa.lab.observers.graph import unreachable
from nsa.model.llama import LanguageModel


class Parts(nn.Module):
    """The loss of three parameters, each reached in its own way."""

    def __init__(self, **ways):
        super().__init__()
        self.ways = {"a": lambda p: p, "b": lambda p: p, "c": lambda p: p} | ways
        for name in self.ways:
            setattr(self, name, nn.Parameter(torch.ones(3)))

    def forward(self):
        parts = [way(getattr(self, name)) for name, way in self.ways.items()]
        return sum(part.sum() for part in parts)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.by


def drive(model, observer, steps=1, passes=1, first=0, forward=None):
    """What a training loop tells its observers."""
    for step in range(first, first + steps):
        observer.on_phase("data", step)
        for _ in range(passes):
            observer.on_phase("forward", step)
            loss = (forward or model)()
            observer.on_phase("backward", step)
            loss.backward()
        observer.on_phase("optimizer", step)
        model.zero_grad()
        observer.on_phase("end", step)


def states(observer, step=None):
    return {row["name"]: row["state"] for row in observer.rows(step)}


def test_a_model_that_is_whole_has_every_gradient_arrive():
    arrival = GradientArrival(model := LanguageModel(tiny()))
    trainer(arrival, model=model).run(2)
    rows = arrival.rows()
    assert summary(rows) == f"arrived={len(list(model.parameters()))} missing=0 zero=0"
    assert [row["order"] for row in rows] == list(range(len(rows)))
    assert (rows[0]["name"], rows[-1]["name"]) == ("head.weight", "embed.weight")
    times = [row["ms"] for row in rows]
    assert times[0] > 0 and times == sorted(times)
    assert {row["step"] for row in rows} == {1}
    assert all(row["largest"] > 0 for row in rows)
    assert arrival.unreachable == ()


def test_missing_zero_and_arrived_are_told_apart():
    model = Parts(b=lambda p: p.detach(), c=lambda p: p * 0)
    arrival = GradientArrival(model, warn=False)
    drive(model, arrival)
    assert states(arrival) == {"a": "arrived", "c": "zero", "b": "missing"}
    missing = arrival.rows()[-1]
    assert missing["order"] is missing["ms"] is missing["largest"] is None
    assert missing["arrivals"] == 0


@pytest.mark.parametrize("factor", [1e-30, float("nan"), float("inf")])
def test_a_gradient_that_is_tiny_or_not_finite_is_not_zero(factor):
    model = Parts(c=lambda p: p * factor)
    arrival = GradientArrival(model)
    drive(model, arrival)
    assert states(arrival)["c"] == "arrived"
    (row,) = [row for row in arrival.rows() if row["name"] == "c"]
    assert row["largest"] == pytest.approx(factor, nan_ok=True)


def test_a_branch_that_is_not_used_is_named_before_the_first_backward():
    arrival = GradientArrival(model := LanguageModel(tiny(force_branch="win")))
    made = trainer(arrival, model=model)
    with pytest.warns(RuntimeWarning, match="does not reach 16 parameter"):
        made.run(2)
    missing = {name for name, state in states(arrival).items() if state == "missing"}
    assert missing == set(arrival.unreachable)
    assert "blocks.0.attention.k_proj.cmp.weight" in missing
    assert "blocks.0.attention.k_proj.win.weight" not in missing


def test_what_is_unreachable_is_known_when_the_backward_starts():
    model = Parts(b=lambda p: p.detach())
    arrival = GradientArrival(model)
    arrival.on_phase("data", 0)
    arrival.on_phase("forward", 0)
    model()
    assert arrival.unreachable is None
    with pytest.warns(RuntimeWarning, match=r"1 parameter\(s\), which will not be trained: b"):
        arrival.on_phase("backward", 0)
    assert arrival.unreachable == ("b",)


def test_each_micro_batch_is_an_arrival():
    model = Parts(b=lambda p: p.detach())
    arrival = GradientArrival(model, warn=False)
    drive(model, arrival, passes=3)
    assert {row["name"]: row["arrivals"] for row in arrival.rows()} == {"a": 3, "c": 3, "b": 0}
    arrival = GradientArrival(model := LanguageModel(tiny()))
    trainer(arrival, model=model, batch=4, accumulate=2).run(1)
    assert {row["arrivals"] for row in arrival.rows()} == {2}


@pytest.mark.parametrize("changes", [{"checkpoint": "all"}, {"checkpoint": "0:1"}])
def test_checkpointing_changes_nothing_that_arrives(changes):
    found = []
    for config in (tiny(), tiny(**changes)):
        arrival = GradientArrival(model := LanguageModel(config))
        trainer(arrival, model=model).run(1)
        found.append(arrival.rows())
        assert arrival.unreachable == ()
    assert compare(found) == []


def test_losses_are_those_of_an_unobserved_run():
    assert trainer(GradientArrival).run(3) == trainer().run(3)


def test_a_training_that_goes_on_is_looked_at_from_its_first_step():
    arrival = GradientArrival(Parts(), every=10)
    for step in range(13, 25):
        arrival.on_phase("data", step)
    assert {row["step"] for row in arrival.rows()} == {23}
    assert {row["step"] for row in arrival.rows(13)} == {13}


def test_only_observed_steps_have_hooks():
    model = Parts()
    arrival = GradientArrival(model, every=2, keep=2)
    hooked = []
    for step in range(5):
        arrival.on_phase("data", step)
        hooked.append(bool(model.a._post_accumulate_grad_hooks))
        for name in ("forward", "backward", "optimizer", "end"):
            arrival.on_phase(name, step)
            if name == "forward":
                loss = model()
            if name == "backward":
                loss.backward()
    assert hooked == [True, False, True, False, True]
    with pytest.raises(ValueError, match="step 1 was not kept; kept are 2, 4"):
        arrival.rows(1)
    arrival.close()
    assert not model.a._post_accumulate_grad_hooks
    assert summary(arrival.rows(4)) == "arrived=3 missing=0 zero=0"


def test_no_number_is_read_before_it_is_asked_for(monkeypatch):
    model = Parts(c=lambda p: p * 0)
    arrival = GradientArrival(model)
    monkeypatch.setattr(Deferred, "ready", lambda self: iter(()))  # a device that is far behind
    drive(model, arrival, steps=2)
    assert len(arrival._norms) == 2
    assert states(arrival, 0) == states(arrival, 1) == {"a": "arrived", "b": "arrived", "c": "zero"}


def test_a_compiled_layer_keeps_its_hooks_and_its_graph_is_said_to_tell_nothing():
    model = nn.Sequential(Scale())
    model[0].compile(backend="aot_eager", fullgraph=True)
    arrival = GradientArrival(model)
    arrival.on_start(SimpleNamespace(config=SimpleNamespace(compile=True)))
    x = torch.ones(2, 3)
    for step in range(2):
        drive(model, arrival, first=step, forward=lambda: model(x).sum())
        assert summary(arrival.rows()) == "arrived=1 missing=0 zero=0"
    assert arrival.unreachable is None
    assert "compiled" in arrival.unreachable_unknown


def test_what_cannot_be_observed_is_refused():
    arrival = GradientArrival(Parts())
    with pytest.raises(ValueError, match="cuda_graph=True replays steps without hooks"):
        arrival.on_start(SimpleNamespace(config=SimpleNamespace(cuda_graph=True)))
    with pytest.raises(ValueError, match="no step was observed yet"):
        arrival.rows()
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        GradientArrival(Parts().requires_grad_(False))
    with pytest.raises(ValueError, match="every=0 and keep=100 must be at least 1"):
        GradientArrival(Parts(), every=0)


def test_ranks_that_saw_the_same_do_not_differ():
    model = Parts()
    arrival = GradientArrival(model)
    drive(model, arrival)
    assert compare([arrival.rows(), arrival.rows(), arrival.rows()]) == []
    assert compare([]) == []


def test_where_ranks_differ_is_named():
    def row(name, state, order, arrivals=1):
        return {"name": name, "state": state, "order": order, "arrivals": arrivals}

    first = [row("a", "arrived", 0), row("b", "arrived", 1), row("c", "zero", 2)]
    second = [row("a", "arrived", 0), row("c", "arrived", 1), row("b", "missing", None, 0)]
    assert compare([first, second]) == [
        {"name": "b", "differs": "state", "by_rank": ["arrived", "missing"]},
        {"name": "c", "differs": "state", "by_rank": ["zero", "arrived"]},
    ]
    swapped = [row("b", "arrived", 0), row("a", "arrived", 1), row("c", "zero", 2)]
    assert compare([first, swapped]) == [
        {"name": "a", "differs": "order", "by_rank": [0, 1]},
        {"name": "b", "differs": "order", "by_rank": [1, 0]},
    ]
    assert compare([first, first[:2]])[0]["by_rank"] == ["zero", None]
    twice = [first[0] | {"arrivals": 2}, *first[1:]]
    assert compare([first, twice])[0] == {"name": "a", "differs": "arrivals", "by_rank": [1, 2]}


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * dy


@pytest.mark.parametrize(
    "way",
    [
        Cube.apply,
        lambda p: checkpoint(Cube.apply, p, use_reentrant=False),
        lambda p: p.view(1, 3).expand(2, 3)[0],
        lambda p: p.half().float(),
    ],
)
def test_a_parameter_is_reached_through(way):
    model = Parts(b=way, c=lambda p: p.detach())
    assert unreachable(model(), model.named_parameters()) == ("c",)


def test_a_parameter_under_two_names_is_reached_under_both():
    model = Parts(b=lambda p: p.detach())
    model.b = model.a
    named = model.named_parameters(remove_duplicate=False)
    assert unreachable(model.a.sum(), named) == ("c",)


def test_frozen_parameters_are_not_missed_and_a_constant_reaches_nothing():
    model = Parts()
    model.c.requires_grad_(False)
    assert unreachable(torch.ones(()), model.named_parameters()) == ("a", "b")
    assert unreachable(model.a, model.named_parameters()) == ("b",)


def test_a_graph_deeper_than_pythons_stack_is_walked():
    model = Parts()
    x = model.a
    for _ in range(5000):
        x = x + 1
    assert unreachable(x.sum(), model.named_parameters()) == ("b", "c")


def test_a_graph_that_does_not_tell_is_refused():
    model = Parts(b=lambda p: checkpoint(Cube.apply, p, use_reentrant=True))
    with pytest.raises(ValueError, match="use_reentrant=False"):
        unreachable(model(), model.named_parameters())
    arrival = GradientArrival(model)
    drive(model, arrival)
    assert arrival.unreachable is None and "reentrant" in arrival.unreachable_unknown
    sharded = Parts()
    sharded.a.device_mesh = object()
    with pytest.raises(ValueError, match="ask before fully_shard"):
        unreachable(sharded(), sharded.named_parameters())
