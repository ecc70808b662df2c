"""What the recorders see of steps whose bytes can be worked out by hand."""

import gc

import pytest
import torch
from torch import nn

from nsa.lab.measure.recorders import (
    CpuRecorder,
    cross_check,
    live_cpu_storages,
    recorder_for,
    training_tensors,
)


@pytest.fixture
def poisoned_memory():
    """Not here: filling memory with NaN allocates."""


class Step:
    """A training step in three lines a phase, for any forward."""

    def __init__(self, forward, parameters):
        self.forward = forward
        self.optimizer = torch.optim.AdamW(parameters)
        self.model = nn.ParameterList(parameters)

    def run(self, on_phase, step):
        on_phase("data", step)
        x = torch.ones(self.forward.inputs)
        on_phase("forward", step)
        loss = self.forward(x)
        on_phase("backward", step)
        loss.backward()
        on_phase("optimizer", step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        on_phase("end", step)


def recorded(forward, parameters):
    step = Step(forward, parameters)
    step.run(lambda name, number: None, 0)
    recorder = CpuRecorder(training_tensors(step.model, step.optimizer))
    with recorder:
        step.run(recorder.on_phase, 1)
    return recorder.record()


class Stack:
    """Linear layers with a sigmoid after each, which keeps its output and nothing else."""

    def __init__(self, rows=50, width=64, layers=3):
        self.inputs = (rows, width)
        self.layers = [nn.Linear(width, width, bias=False) for _ in range(layers)]

    def __call__(self, x):
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return x.sum()


def held_by_others() -> int:
    """Bytes of tensors that earlier tests left alive: to a recorder they are resident too."""
    gc.collect()
    return sum(live_cpu_storages().values())


@pytest.mark.full
def test_a_linear_stack_has_the_bytes_worked_out_by_hand():
    others = held_by_others()
    stack = Stack(rows=50, width=64, layers=3)
    weight, row = 4 * 64 * 64, 4 * 50 * 64
    found = recorded(stack, [layer.weight for layer in stack.layers])
    adam = 3 * (2 * weight + 4)  # two moments and a step count each
    forward = found["by_phase_category"]["forward"]
    assert forward["parameters"] == 3 * weight
    assert forward["optimizer_state"] == adam
    assert forward["inputs"] == row
    assert forward["gradients"] == 0
    # Two sigmoids are there, the third's output comes beside its input.
    assert forward["activations"] == 3 * row and forward["temporaries"] == row
    assert found["by_phase_category"]["optimizer"]["gradients"] == 3 * weight
    assert found["held"]["activations"] == 3 * row + 4  # and the loss
    assert found["phases"]["forward"] == 3 * weight + adam + 5 * row + forward["resident"]
    assert forward["resident"] <= others + 64
    assert found["cross_check"]["agrees"] and found["cross_check"]["unknown_frees"] == 0
    assert found["peak"] == max(found["phases"].values())


class Quadratic:
    """Keeps one T x T buffer for the backward, and frees another one at once."""

    def __init__(self, tokens):
        self.inputs = (tokens, 1)
        self.weight = nn.Parameter(torch.ones(1))

    def __call__(self, x):
        torch.zeros(3, *x.shape[:1], x.shape[0]).sum()
        scores = torch.sigmoid(self.weight * x @ x.T)
        return scores.sum()


@pytest.mark.full
def test_a_planted_t_by_t_buffer_is_an_activation_that_grows_as_t_squared():
    found = {}
    for tokens in (128, 256):
        quadratic = Quadratic(tokens)
        found[tokens] = recorded(quadratic, [quadratic.weight])
    small, large = (found[tokens]["held"]["activations"] for tokens in (128, 256))
    assert 4 * 256**2 <= large <= 1.02 * 4 * 256**2
    assert 3.9 < large / small < 4.05


def test_what_the_forward_frees_is_temporary():
    quadratic = Quadratic(256)
    forward = recorded(quadratic, [quadratic.weight])["by_phase_category"]["forward"]
    assert 0 <= forward["temporaries"] - 3 * 4 * 256**2 < 64  # and a sum or two
    assert forward["activations"] == 0


def test_a_buffer_made_in_the_backward_is_temporary():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            torch.zeros(1_000_000)
            return grad.expand(8, 4)

    def forward(x):
        return Doubled.apply(weight + x)

    forward.inputs = (8, 4)
    weight = nn.Parameter(torch.ones(8, 4))
    found = recorded(forward, [weight])
    assert found["by_phase_category"]["backward"]["temporaries"] >= 4_000_000
    assert found["by_phase_category"]["forward"]["temporaries"] < 1000
    assert found["peak"] == found["phases"]["backward"]


@pytest.mark.full
def test_memory_that_was_there_before_is_resident_unless_it_was_borrowed():
    others = held_by_others()
    cache = torch.zeros(1_000_000)
    borrowed = torch.frombuffer(bytearray(3_000_000), dtype=torch.uint8)
    storages = live_cpu_storages()
    assert storages[cache.data_ptr()] == 4_000_000
    assert borrowed.data_ptr() not in storages
    quadratic = Quadratic(8)
    resident = recorded(quadratic, [quadratic.weight])["by_category"]["resident"]
    assert 4_000_000 <= resident - others < 5_000_000


def test_recording_leaves_the_profiler_off_and_function_events_on():
    quadratic = Quadratic(8)
    recorded(quadratic, [quadratic.weight])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3).sum()
    assert "aten::sum" in {event.key for event in profile.key_averages()}


def test_an_error_in_a_phase_leaves_the_profiler_off():
    recorder = CpuRecorder(dict)
    with pytest.raises(ArithmeticError), recorder:
        recorder.on_phase("forward", 0)
        raise ArithmeticError
    quadratic = Quadratic(8)
    assert recorded(quadratic, [quadratic.weight])["peak"] > 0


def test_a_device_that_cannot_be_recorded_is_refused():
    with pytest.raises(ValueError, match="'meta' cannot be recorded"):
        recorder_for("meta", dict)


def test_the_cross_check_says_when_two_peaks_differ_by_more_than_one_percent():
    assert cross_check(1000, 1009)["agrees"] and cross_check(1000, 991)["note"] == ""
    assert not cross_check(1000, 1011)["agrees"]
    assert "+1.1%" in cross_check(1000, 1011)["note"]
    overflown = cross_check(1000, None, "the history overflowed 5 entries")
    assert not overflown["agrees"] and "overflowed" in overflown["note"]
