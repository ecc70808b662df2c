from functools import partial
from types import SimpleNamespace

import observed
import pytest
import torch
from observed import drive
from torch import nn

from workbook.lab.observers.module_order import ModuleOrder


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        raise RuntimeError("stopped here")


class Layer(nn.Module):
    def __init__(self, stops=False, in_place=False):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.stops, self.in_place = stops, in_place

    def forward(self, x):
        x = self.inner(x)
        if self.in_place:
            x += 1
        return Stop.apply(x) if self.stops else x


def run(model, order, step=0):
    drive(model, [order], first=step, forward=lambda: model(torch.ones(2, 4)).sum())


trained = partial(observed.trained, ModuleOrder)


def names(order):
    return [row["name"] for row in order.rows()]


def test_backward_goes_through_the_layers_from_the_last_and_from_outside_in():
    order, model = trained(steps=2)
    found = names(order)
    assert found[:2] == ["head", "norm"] and found[-1] == "embed_tokens"
    at = found.index
    assert (
        at("blocks.1")
        < at("blocks.1.mlp")
        < at("blocks.1.mlp.down_proj")
        < at("blocks.1.mlp.gate_proj")
    )
    assert at("blocks.1.mlp.down_proj") < at("blocks.1.attention") < at("blocks.1.attention.q_proj")
    assert at("blocks.1.attention.q_proj") < at("blocks.0") < at("blocks.0.attention.q_proj")
    called = {name for name, m in model.named_modules() if type(m) not in (nn.ModuleList,)}
    assert set(found) | {"blocks.0.attention.gate1"} <= called
    rows = order.rows()
    assert [row["order"] for row in rows] == list(range(len(rows)))
    times = [row["ms"] for row in rows]
    assert times == sorted(times)
    assert {row["step"] for row in rows} == {1}


shared = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("model", "order"),
    [
        # outer modules come before inner ones that made their output
        (
            [nn.Linear(4, 4), Layer(), nn.Sequential(Layer())],
            ["2", "2.0", "2.0.inner", "1", "1.inner", "0"],
        ),
        # outputs can still be changed in place
        (
            [Layer(in_place=True), nn.ReLU(inplace=True), Layer()],
            ["2", "2.inner", "1", "0", "0.inner"],
        ),
        # a module that runs twice appears when its backward first begins
        ([shared, nn.ReLU(), shared], ["0", "1"]),
    ],
)
def test_modules_come_in_the_order_of_their_backwards(model, order):
    model = nn.Sequential(*model)
    seen = ModuleOrder(model)
    run(model, seen)
    assert names(seen) == order


def test_checkpointing_leaves_the_order_as_it_is():
    plain, checkpointed = trained()[0], trained(model={"checkpoint": "all"})[0]
    assert names(plain) == names(checkpointed)


def test_the_module_in_which_a_backward_stopped_is_the_last():
    model = nn.Sequential(Layer(), Layer(stops=True), Layer())
    order = ModuleOrder(model)
    with pytest.raises(RuntimeError, match="stopped here"):
        run(model, order, step=7)
    assert order.last == (7, "backward", "1")
    assert order.here() == "step 7, backward in 1"


def test_the_module_in_which_a_forward_stopped_is_the_last():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))
    order = ModuleOrder(model)
    assert order.here() == "no step was observed yet"
    with pytest.raises(RuntimeError, match="shapes"):
        run(model, order)
    assert order.here() == "step 0, forward in 1"


def test_each_micro_batch_has_its_own_order():
    order, _ = trained(batch=4, accumulate=2)
    rows = order.rows()
    halves = [[row["name"] for row in rows if row["micro"] == micro] for micro in (0, 1)]
    assert halves[0] == halves[1] and len(halves[0]) + len(halves[1]) == len(rows)


def test_only_observed_steps_have_hooks():
    model = nn.Sequential(nn.Linear(4, 4))
    order = ModuleOrder(model, every=2, keep=1)
    for step in range(7, 10):
        run(model, order, step)
        assert not model[0]._forward_hooks
    with pytest.raises(ValueError, match="step 8 was not kept; kept are 9"):
        order.rows(8)
    assert names(order) == ["0"]


@pytest.mark.parametrize("name", ["compile", "cuda_graph"])
def test_what_runs_no_hooks_is_refused(name):
    order = ModuleOrder(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=f"{name}=True runs no hooks of modules"):
        order.on_start(SimpleNamespace(config=SimpleNamespace(**{name: True})))
