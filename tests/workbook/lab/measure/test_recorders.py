"""Recorders see steps whose bytes can be worked out by hand."""

import gc

import pytest
import torch
from snapshots import entry, snapshot
from torch import nn

from workbook.lab.measure import recorders
from workbook.lab.measure.recorders import (
    CpuRecorder,
    CudaRecorder,
    cross_check,
    live_cpu_storages,
    recorder_for,
    training_tensors,
)


@pytest.fixture
def poisoned_memory():
    """Not here: filling memory with NaN allocates."""


def recorded(forward, parameters, make=CpuRecorder):
    """The record of the second of two training steps, in three lines a phase."""
    optimizer = torch.optim.AdamW(parameters)

    def step(on_phase):
        on_phase("data", 0)
        x = torch.ones(forward.inputs, device=parameters[0].device)
        on_phase("forward", 0)
        loss = forward(x)
        on_phase("backward", 0)
        loss.backward()
        on_phase("optimizer", 0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        on_phase("end", 0)

    step(lambda name, number: None)
    with make(training_tensors(nn.ParameterList(parameters), optimizer)) as recorder:
        step(recorder.on_phase)
    return recorder.record()


class Stack:
    """Linear layers with a sigmoid after each, which keeps its output and nothing else."""

    def __init__(self, rows, width, layers=3, device="cpu"):
        self.inputs = (rows, width)
        self.weights = [
            nn.Parameter(torch.ones(width, width, device=device)) for _ in range(layers)
        ]

    def __call__(self, x):
        for weight in self.weights:
            x = torch.sigmoid(nn.functional.linear(x, weight))
        return x.sum()


def held_by_others() -> int:
    """Bytes of tensors that earlier tests left alive: to a recorder they are resident too."""
    gc.collect()
    return sum(live_cpu_storages().values())


@pytest.mark.full
def test_a_linear_stack_has_the_bytes_worked_out_by_hand():
    others = held_by_others()
    stack = Stack(rows=50, width=64)
    weight, row = 4 * 64 * 64, 4 * 50 * 64
    found = recorded(stack, stack.weights)
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


def quadratic(tokens):
    """Keeps one T x T buffer for the backward, and frees another one at once."""
    weight = nn.Parameter(torch.ones(1))

    def forward(x):
        torch.zeros(3, tokens, tokens).sum()
        return torch.sigmoid(weight * x @ x.T).sum()

    forward.inputs = (tokens, 1)
    return recorded(forward, [weight])


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
    resident = quadratic(8)["by_category"]["resident"]
    assert 4_000_000 <= resident - others < 5_000_000


def test_recording_leaves_the_profiler_off_and_function_events_on_also_after_an_error():
    recorder = CpuRecorder(dict)
    with pytest.raises(ArithmeticError), recorder:
        recorder.on_phase("forward", 0)
        raise ArithmeticError
    assert quadratic(8)["peak"] > 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3).sum()
    assert "aten::sum" in {event.key for event in profile.key_averages()}


def test_a_device_that_cannot_be_recorded_is_refused():
    with pytest.raises(ValueError, match="'meta' cannot be recorded"):
        recorder_for("meta", dict)


def test_the_cross_check_says_when_two_peaks_differ_by_more_than_one_percent():
    assert cross_check(1000, 1009)["agrees"] and cross_check(1000, 991)["note"] == ""
    assert not cross_check(1000, 1011)["agrees"]
    assert "+1.1%" in cross_check(1000, 1011)["note"]
    overflown = cross_check(1000, None, "the history overflowed 5 entries")
    assert not overflown["agrees"] and "overflowed" in overflown["note"]


def fake_cuda(monkeypatch, before, phases):
    """The few calls of torch.cuda that the recorder makes, over planned phases; notes of two."""
    snapshots, peaks, calls = [before, *(taken for taken, _ in phases)], [p for _, p in phases], []
    for where, answers in {
        torch.cuda: {
            "current_device": lambda: 0,
            "get_allocator_backend": lambda: "native",
            "reset_peak_memory_stats": lambda: calls.append("reset"),
            "max_memory_allocated": lambda: peaks.pop(0),
            "max_memory_reserved": lambda: 4096,
        },
        torch.cuda.memory: {
            "_snapshot": lambda: snapshots.pop(0),
            "_record_memory_history": lambda enabled, **options: calls.append(enabled),
        },
    }.items():
        for name, answer in answers.items():
            monkeypatch.setattr(where, name, answer)
    return calls


@pytest.mark.parametrize(("max_entries", "known"), [(100, True), (2, False)])
def test_peaks_come_from_statistics_and_categories_from_history(monkeypatch, max_entries, known):
    held = ("active_allocated", 512, 4)
    before = snapshot([], [held])
    forward = snapshot(
        [entry("alloc", 512, 1000), entry("alloc", 2048, 512), entry("free_requested", 2048, 512)],
        [held, ("active_allocated", 1024, 1000)],
    )
    backward = snapshot([entry("free_requested", 512, 1000)], [held])
    calls = fake_cuda(monkeypatch, before, [(forward, 2048), (backward, 1536)])
    monkeypatch.setattr(recorders, "MOST_ENTRIES", max_entries)
    recorder = CudaRecorder(dict)
    with recorder:
        for phase in ("forward", "backward", "end"):
            recorder.on_phase(phase, 1)
    found = recorder.record()
    assert found["phases"] == {"forward": 2048, "backward": 1536} and found["peak"] == 2048
    assert found["reserved"] == 4096
    assert found["cross_check"]["agrees"] is known
    assert calls[:3] == ["all", "reset", None]
    if known:
        assert found["by_category"]["activations"] == 1024
        assert found["by_category"]["temporaries"] == found["by_category"]["resident"] == 512
        assert found["by_phase_category"]["backward"]["activations"] == 1024
    else:
        assert found["by_category"] == {} and "overflowed" in found["cross_check"]["note"]


@pytest.mark.gpu
def test_a_linear_stack_on_a_gpu_has_the_bytes_worked_out_by_hand():
    width, rows = 512, 1024
    stack = Stack(rows, width, device="cuda")
    found = recorded(stack, stack.weights, CudaRecorder)
    weight, row = 4 * width**2, 4 * rows * width
    assert found["held"]["parameters"] == found["held"]["gradients"] == 3 * weight
    assert found["held"]["optimizer_state"] == 6 * weight  # the step counts are on the CPU
    assert found["held"]["inputs"] == row
    assert 3 * row <= found["held"]["activations"] <= 3 * row + 1024
    assert found["cross_check"]["agrees"], found["cross_check"]
