"""Costs of a step, measured beside it and after it."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from whyhung.watch import Progress
from workbook.lab.measure.steps import MEASURED, StepMeter
from workbook.lab.search.training_subject import make

SMALL = {"layers": 1, "tokens": 48, "device": "cpu", "backend": "gather", "threads": 1}


@pytest.fixture
def trained(tmp_path):
    """The subject after two steps, closed at the end."""
    progress, made = Progress(tmp_path / "progress"), []

    def train(**settings):
        subject = make(SMALL | settings, progress)
        made.append(subject)
        for i in range(2):
            subject.step(i)
        return subject

    yield train
    for subject in made:
        subject.close()
    progress.close()


def test_a_step_is_timed_from_its_begin_to_its_end():
    meter = StepMeter()
    for seconds in (0.02, 0.0):
        meter.begin()
        time.sleep(seconds)
        meter.end()
        time.sleep(0.02)
    long, short = meter.result()["seconds"]
    assert long >= 0.02 > short
    assert max(meter.result()["processor"]) < long  # sleep is no work


def test_on_a_gpu_it_waits_for_the_device_and_tells_each_steps_peaks(monkeypatch):
    calls = []
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        synchronize=lambda: calls.append("wait"),
        reset_peak_memory_stats=lambda: calls.append("reset"),
        memory_stats=lambda: {f"{name}_bytes.all.peak": n * 2**20 for name, n in peaks.items()},
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    meter = StepMeter()
    for allocated, reserved in ((3, 5), (4, 4)):
        peaks = {"allocated": allocated, "reserved": reserved, "inactive_split": 0.5}
        meter.begin()
        meter.end()
    found = meter.result()
    assert calls == ["wait", "reset", "wait"] * 2
    assert (found["allocated"], found["reserved"]) == ([3, 4], [5, 4])
    assert (found["fragmentation"], found["inactive_split"]) == ([2, 0], [0.5, 0.5])


def test_what_would_slow_steps_is_measured_in_further_ones(trained):
    subject = trained()
    before = subject.trainer.observers
    found, told = subject.measured(count=True)
    assert subject.trainer.steps_done == 2 + 3 + 1 + 1 + 1
    assert subject.trainer.observers == before
    asked = set(MEASURED) - {"seconds", "processor", "reserved", "fragmentation"}
    assert asked < set(found) and all(found[name] > 0 for name in asked)
    assert 0 < found["growing"] < found["allocated"]
    assert told["arrival"]["ok"] and told["finite"]["ok"]


def test_operations_and_nodes_grow_with_layers_and_are_not_counted_unasked(trained):
    def counted(layers):
        found, _ = trained(layers=layers).measured(count=True)
        return found["operations"], found["nodes"]

    one, two = counted(1), counted(2)
    assert one[0] < two[0] < 2 * one[0] and one[1] < two[1] < 2 * one[1]
    assert "operations" not in trained().measured(count=False)[0]


def test_gradients_have_one_digest_whatever_is_recomputed_and_another_of_another_model(trained):
    def digest(**settings):
        return trained(**settings).measured(count=False)[0]["gradients"]

    plain = digest()
    assert digest(checkpoint="all") == plain != digest(seed=3)


def test_a_lost_gradient_is_told_though_no_oracle_watched_the_steps(trained):
    _, told = trained(safe_packing=False).measured(count=False)
    assert told["arrival"]["ok"] is False


@pytest.mark.gpu
def test_a_gpus_step_has_its_peaks_and_its_phases(trained):
    subject, meter = trained(device="cuda"), StepMeter()
    meter.begin()
    subject.step(2)
    meter.end()
    found = meter.result()
    assert found["reserved"][0] >= found["allocated"][0] > 0
    more, _ = subject.measured(count=True)
    whole = more["forward"] + more["backward"] + more["optimizer"]
    assert 0.3 < whole / found["seconds"][0] < 3
    assert "allocated" not in more and more["operations"] > 0
    assert torch.cuda.is_initialized()
