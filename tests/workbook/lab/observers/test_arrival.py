from functools import partial
from types import SimpleNamespace

import observed
import pytest
import torch
from observed import drive
from torch import nn
from torch.utils.checkpoint import checkpoint

from workbook.lab.observers.arrival import GradientArrival
from workbook.lab.observers.deferred import Deferred
from workbook.lab.observers.graph import unreachable


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


def detach(p):
    return p.detach()


def seen(model, **options):
    """The arrivals of one step of it."""
    arrival = GradientArrival(model, **options)
    drive(model, [arrival])
    return arrival


trained = partial(observed.trained, GradientArrival)


def column(rows, name):
    return {row["name"]: row[name] for row in rows}


def test_a_model_that_is_whole_has_every_gradient_arrive():
    arrival, model = trained(steps=2)
    rows = arrival.rows()
    assert [row["state"] for row in rows] == ["arrived"] * len(list(model.parameters()))
    assert [row["order"] for row in rows] == list(range(len(rows)))
    assert (rows[0]["name"], rows[-1]["name"]) == ("head.weight", "embed_tokens.weight")
    times = [row["ms"] for row in rows]
    assert times[0] > 0 and times == sorted(times)
    assert {row["step"] for row in rows} == {1}
    assert all(row["largest"] > 0 for row in rows)
    assert arrival.unreachable == ()


def test_missing_zero_and_arrived_are_told_apart():
    rows = seen(Parts(b=detach, c=lambda p: p * 0), warn=False).rows()
    assert column(rows, "state") == {"a": "arrived", "c": "zero", "b": "missing"}
    missing = rows[-1]
    assert missing["order"] is missing["ms"] is missing["largest"] is None
    assert missing["arrivals"] == 0


@pytest.mark.parametrize("factor", [1e-30, float("nan"), float("inf")])
def test_a_gradient_that_is_tiny_or_not_finite_is_not_zero(factor):
    rows = seen(Parts(c=lambda p: p * factor)).rows()
    assert column(rows, "state")["c"] == "arrived"
    assert column(rows, "largest")["c"] == pytest.approx(factor, nan_ok=True)


def test_what_is_unreachable_is_known_when_the_backward_starts():
    model = Parts(b=detach)
    arrival = GradientArrival(model)
    arrival.on_phase("data", 0)
    arrival.on_phase("forward", 0)
    model()
    assert arrival.unreachable is None
    with pytest.warns(RuntimeWarning, match=r"1 parameter\(s\), which will not be trained: b"):
        arrival.on_phase("backward", 0)
    assert arrival.unreachable == ("b",)


def test_each_micro_batch_is_an_arrival():
    model = Parts(b=detach)
    arrival = GradientArrival(model, warn=False)
    drive(model, [arrival], passes=3)
    assert column(arrival.rows(), "arrivals") == {"a": 3, "c": 3, "b": 0}
    arrival, _ = trained(batch=4, accumulate=2)
    assert {row["arrivals"] for row in arrival.rows()} == {2}


@pytest.mark.parametrize("changes", [{"checkpoint": "all"}, {"checkpoint": "0:1"}])
def test_checkpointing_changes_nothing_that_arrives(changes):
    plain, changed = trained()[0], trained(model=changes)[0]
    assert plain.unreachable == changed.unreachable == ()
    for name in ("state", "arrivals", "order"):
        assert column(plain.rows(), name) == column(changed.rows(), name)


def test_a_training_that_goes_on_is_looked_at_from_its_first_step():
    arrival = GradientArrival(Parts(), every=10)
    for step in range(13, 25):
        arrival.on_phase("data", step)
    assert {row["step"] for row in arrival.rows()} == {23}
    assert {row["step"] for row in arrival.rows(13)} == {13}


def test_only_observed_steps_have_hooks():
    model, hooked = Parts(), []

    def forward():
        hooked.append(bool(model.a._post_accumulate_grad_hooks))
        return model()

    arrival = GradientArrival(model, every=2, keep=2)
    drive(model, [arrival], steps=5, forward=forward)
    assert hooked == [True, False, True, False, True]
    assert not model.a._post_accumulate_grad_hooks
    with pytest.raises(ValueError, match="step 1 was not kept; kept are 2, 4"):
        arrival.rows(1)
    arrival.on_phase("data", 6)
    assert model.a._post_accumulate_grad_hooks
    arrival.close()
    assert not model.a._post_accumulate_grad_hooks
    assert [row["state"] for row in arrival.rows(4)] == ["arrived"] * 3


def test_no_number_is_read_before_it_is_asked_for(monkeypatch):
    model = Parts(c=lambda p: p * 0)
    arrival = GradientArrival(model)
    monkeypatch.setattr(Deferred, "ready", lambda self: iter(()))  # a device that is far behind
    drive(model, [arrival], steps=2)
    assert len(arrival._norms) == 2
    for step in (0, 1):
        states = column(arrival.rows(step), "state")
        assert states == {"a": "arrived", "b": "arrived", "c": "zero"}


def test_a_compiled_layer_keeps_its_hooks_and_its_graph_is_said_to_tell_nothing():
    model = nn.Sequential(Scale())
    model[0].compile(backend="aot_eager", fullgraph=True)
    arrival = GradientArrival(model)
    arrival.on_start(SimpleNamespace(config=SimpleNamespace(compile=True)))
    x = torch.ones(2, 3)
    for step in range(2):
        drive(model, [arrival], first=step, forward=lambda: model(x).sum())
        assert [row["state"] for row in arrival.rows()] == ["arrived"]
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


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * dy


def add_often(p):
    """A graph deeper than Python's stack."""
    for _ in range(5000):
        p = p + 1
    return p


@pytest.mark.parametrize(
    "way",
    [
        Cube.apply,
        lambda p: checkpoint(Cube.apply, p, use_reentrant=False),
        lambda p: p.view(1, 3).expand(2, 3)[0],
        lambda p: p.half().float(),
        add_often,
    ],
)
def test_a_parameter_is_reached_through(way):
    model = Parts(b=way, c=detach)
    assert unreachable(model(), model.named_parameters()) == ("c",)


def test_names_of_one_parameter_frozen_ones_and_constants_are_told_apart():
    model = Parts()
    model.c.requires_grad_(False)
    assert unreachable(torch.ones(()), model.named_parameters()) == ("a", "b")
    assert unreachable(model.a, model.named_parameters()) == ("b",)
    model = Parts(b=detach)
    model.b = model.a
    named = model.named_parameters(remove_duplicate=False)
    assert unreachable(model.a.sum(), named) == ("c",)


def test_a_graph_that_does_not_tell_is_refused():
    model = Parts(b=lambda p: checkpoint(Cube.apply, p, use_reentrant=True))
    with pytest.raises(ValueError, match="use_reentrant=False"):
        unreachable(model(), model.named_parameters())
    arrival = seen(model)
    assert arrival.unreachable is None and "reentrant" in arrival.unreachable_unknown
    sharded = Parts()
    sharded.a.device_mesh = object()
    with pytest.raises(ValueError, match="ask before fully_shard"):
        unreachable(sharded(), sharded.named_parameters())
