"""Snapshots of torch.cuda.memory, as a GPU wrote them but smaller, read without one."""

import pytest
import torch
from torch import nn

from nsa.lab.measure import recorders
from nsa.lab.measure.allocations import Section, Stream, blocks_of, read_section

BASE = 0x7F0000000000


def entry(action, offset, size, time_us=0):
    return {
        "action": action, "addr": BASE + offset, "size": size, "stream": 0, "time_us": time_us
    }  # fmt: skip


def snapshot(trace, blocks, device=0):
    """One segment whose blocks lie one after the other, as [(state, size, requested)]."""
    described = [
        {"state": state, "size": size, "requested_size": requested}
        for state, size, requested in blocks
    ]
    segment = {
        "device": device, "address": BASE, "total_size": sum(size for _, size, _ in blocks),
        "stream": 0, "segment_type": "large", "blocks": described,
    }  # fmt: skip
    traces = [[] for _ in range(device)] + [trace]
    return {"segments": [segment], "device_traces": traces}


def test_blocks_in_use_are_found_where_they_lie():
    found = blocks_of(
        snapshot([], [("active_allocated", 512, 4), ("inactive", 1024, 0),
                      ("active_pending_free", 512, 9), ("active_allocated", 2048, 1600)]),
        0,
    )  # fmt: skip
    assert found == {BASE: 512, BASE + 2048: 2048}


def test_a_segment_of_another_device_is_left_out():
    taken = snapshot([], [("active_allocated", 512, 4)], device=1)
    assert blocks_of(taken, 0) == {} and blocks_of(taken, 1) == {BASE: 512}
    assert read_section(taken, 3) == Section([], 0)


def test_sizes_are_rounded_and_those_still_alive_are_true():
    trace = [
        entry("segment_alloc", 0, 20 * 2**20),
        entry("alloc", 0, 100),  # came and went: only the rounding is known
        entry("free_requested", 0, 100),
        entry("free_completed", 0, 100),
        entry("alloc", 0, 1_048_577),  # got 1 MiB more than it asked for
        entry("alloc", 4 * 2**20, 1),
    ]
    taken = snapshot(
        trace, [("active_allocated", 4 * 2**20, 1_048_577), ("active_allocated", 512, 1)]
    )
    section = read_section(taken, 0)
    assert section.entries == 6
    assert section.events == [
        (BASE, 512), (BASE, None), (BASE, 4 * 2**20), (BASE + 4 * 2**20, 512)
    ]  # fmt: skip


def test_a_free_counts_when_it_is_requested_and_once():
    trace = [entry("alloc", 0, 512), entry("free_requested", 0, 512)]
    assert read_section(snapshot(trace, []), 0).events == [(BASE, 512), (BASE, None)]
    trace.append(entry("free_completed", 0, 512))
    assert len(read_section(snapshot(trace, []), 0).events) == 2


def test_a_history_that_overflowed_is_not_replayed():
    stream = Stream()
    assert recorders.extend(stream, Section([(1, 512)], 5), max_entries=5) == (
        "the history overflowed 5 entries"
    )
    assert len(stream) == 0
    assert recorders.extend(stream, Section([(1, 512)], 4), max_entries=5) == ""
    assert len(stream) == 1


class FakeCuda:
    """The few calls of torch.cuda that the recorder makes, over a list of planned phases."""

    def __init__(self, monkeypatch, before, phases):
        self.snapshots = [before, *(taken for taken, _ in phases)]
        self.peaks = [peak for _, peak in phases]
        self.calls = []
        for name, function in {
            "current_device": lambda: 0,
            "get_allocator_backend": lambda: "native",
            "reset_peak_memory_stats": lambda: self.calls.append("reset"),
            "max_memory_allocated": lambda: self.peaks.pop(0),
            "max_memory_reserved": lambda: 4096,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: self.snapshots.pop(0))
        monkeypatch.setattr(
            torch.cuda.memory,
            "_record_memory_history",
            lambda enabled, **options: self.calls.append(enabled),
        )


@pytest.mark.parametrize(("max_entries", "known"), [(100, True), (2, False)])
def test_peaks_come_from_statistics_and_categories_from_history(monkeypatch, max_entries, known):
    held = ("active_allocated", 512, 4)
    before = snapshot([], [held])
    forward = snapshot(
        [entry("alloc", 512, 1000), entry("alloc", 2048, 512), entry("free_requested", 2048, 512)],
        [held, ("active_allocated", 1024, 1000)],
    )
    backward = snapshot([entry("free_requested", 512, 1000)], [held])
    fake = FakeCuda(monkeypatch, before, [(forward, 2048), (backward, 1536)])
    recorder = recorders.CudaRecorder(dict, max_entries=max_entries)
    with recorder:
        recorder.on_phase("forward", 1)
        recorder.on_phase("backward", 1)
        recorder.on_phase("end", 1)
    found = recorder.record()
    assert found["phases"] == {"forward": 2048, "backward": 1536} and found["peak"] == 2048
    assert found["reserved"] == 4096
    assert found["cross_check"]["agrees"] is known
    assert fake.calls[:3] == ["all", "reset", None]
    if known:
        assert found["by_category"]["activations"] == 1024
        assert found["by_category"]["temporaries"] == found["by_category"]["resident"] == 512
        assert found["by_phase_category"]["backward"]["activations"] == 1024
    else:
        assert found["by_category"] == {} and "overflowed" in found["cross_check"]["note"]


@pytest.mark.gpu
def test_a_linear_stack_on_a_gpu_has_the_bytes_worked_out_by_hand():
    width, rows = 512, 1024
    layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3))).cuda()
    optimizer = torch.optim.AdamW(layers.parameters())

    def step(on_phase):
        on_phase("data", 0)
        x = torch.ones(rows, width, device="cuda")
        on_phase("forward", 0)
        for layer in layers:
            x = torch.sigmoid(layer(x))
        loss = x.sum()
        on_phase("backward", 0)
        loss.backward()
        on_phase("optimizer", 0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        on_phase("end", 0)

    step(lambda name, number: None)
    recorder = recorders.CudaRecorder(recorders.training_tensors(layers, optimizer))
    with recorder:
        step(recorder.on_phase)
    found = recorder.record()
    weight, row = 4 * width**2, 4 * rows * width
    assert found["held"]["parameters"] == found["held"]["gradients"] == 3 * weight
    assert found["held"]["optimizer_state"] == 6 * weight  # the step counts are on the CPU
    assert found["held"]["inputs"] == row
    assert 3 * row <= found["held"]["activations"] <= 3 * row + 1024
    assert found["cross_check"]["agrees"], found["cross_check"]
