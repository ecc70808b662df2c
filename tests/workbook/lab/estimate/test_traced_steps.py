"""Estimates traced on a CPU, compared with its allocator's events, and their short cuts."""

from dataclasses import replace

import pytest

from nsa.attention import span
from nsa.attention.backends import gather, packed
from workbook.lab.estimate import layers, pretend, trace
from workbook.lab.estimate.estimate import estimate, saved, whole
from workbook.lab.estimate.gpus import gpu_named
from workbook.lab.measure.allocations import replay
from workbook.lab.measure.recorders import recorder_for, training_tensors
from workbook.lab.training import TrainingSpec, open_trainer

EXACT = 0.01


def cell(preset: str, backend: str, tokens: int, layers: int, **changes) -> TrainingSpec:
    attention, _, kernel = backend.rpartition(" ")
    chosen = {"attention": attention} if attention else {}
    return TrainingSpec(preset, tokens, backend=kernel, layers=layers, **chosen, **changes)


QUICK = [
    cell("cpu_test", "masked", 137, 1, checkpoint="0:1", batch=3),
    cell("cpu_test", "masked", 160, 1, precision="bf16"),
    cell("smoke", "gather", 85, 1),
    cell("cpu_test", "gather", 130, 1, checkpoint="all", precision="bf16"),
    cell("cpu_test", "packed", 99, 2, batch=2),
    cell("smoke", "packed", 130, 1, precision="bf16"),
    cell("cpu_test", "sequential", 20, 1, batch=2),
    cell("cpu_test", "sdpa", 238, 2, checkpoint="0:1"),
    cell("cpu_test", "sdpa:math", 200, 1, precision="bf16", batch=2),
    cell("smoke", "sdpa:flash", 261, 1, precision="bf16"),
    cell("cpu_test", "dense sdpa", 341, 2, batch=2),
    cell("smoke", "dense sdpa:math", 150, 1, checkpoint="all"),
    cell("cpu_test", "dense auto", 646, 5, checkpoint="0:1", precision="bf16"),
]
TUNED = [  # with which the rules were made
    cell("cpu_test", "masked", 627, 1, batch=2, checkpoint="all"),
    cell("smoke", "gather", 300, 1, checkpoint="0:1", precision="bf16"),
    cell("production", "packed", 145, 1),
    cell("smoke", "sdpa", 576, 2, precision="bf16"),
    cell("smoke", "sdpa:math", 496, 1, batch=2),
    cell("smoke", "sdpa:flash", 379, 5, checkpoint="all"),
    cell("cpu_test", "sequential", 40, 5, checkpoint="1:4"),
    cell("production", "dense sdpa", 232, 1, batch=2),
    cell("cpu_test", "gather", 100, 2, changes={"shared_kv": True, "phi": "linear"}),
    cell("cpu_test", "packed", 100, 1, changes={"gate": "softmax", "compress_rope": "after"}),
]
# Drawn when the rules were no longer changed; a selection of 44, of which the worst was 0.33 % off.
HELD_OUT = [
    cell("repro", "sdpa:flash", 160, 1, checkpoint="0:1", batch=3, precision="bf16"),
    cell("smoke", "gather", 89, 1, checkpoint="all", batch=3),
    cell("cpu_test", "masked", 464, 1, precision="bf16"),
    cell("repro", "packed", 482, 1, checkpoint="all", precision="bf16"),
    cell("smoke", "sdpa:math", 245, 2, precision="bf16"),
    cell("production", "dense sdpa", 85, 2, checkpoint="all", batch=2),
    cell("smoke", "dense sdpa:flash", 27, 5, batch=2, precision="bf16"),
]


def estimated_of(spec: TrainingSpec) -> dict[str, float]:
    """Each phase's peak, estimated over measured. What the process holds beside is left out."""
    with open_trainer(replace(spec, data="synthetic")) as trainer:
        trainer.step(0)
        recorder = recorder_for("cpu", training_tensors(trainer.model, trainer.optimizer))
        trainer.observers = (recorder,)
        with recorder:
            trainer.step(1)
        real = recorder.record()
    ours = estimate(spec)
    assert ours.unknown == {}

    def own(phases, categories):
        return {name: size - categories[name]["resident"] for name, size in phases.items()}

    measured = own(real["phases"], real["by_phase_category"])
    return {
        name: size / measured[name] - 1
        for name, size in own(ours.phases, ours.by_phase_category).items()
    }


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=mark, id=spec.told(spec.backend, str(spec.tokens)))
        for specs, mark in (
            (QUICK, pytest.mark.full), (TUNED, pytest.mark.long), (HELD_OUT, pytest.mark.slow)
        )
        for spec in specs
    ],
)  # fmt: skip
def test_a_cpu_s_peaks_are_those_of_its_allocator(spec):
    errors = estimated_of(spec)
    # What torch's flash kernel of a CPU holds for a moment hangs on the processor: 4 % were seen.
    limit = 0.06 if spec.backend == "sdpa:flash" else EXACT
    assert max(map(abs, errors.values())) < limit, errors


def peaks(found: trace.Trace) -> dict:
    seen = replay(trace.steady(found.stream))
    return {name: seen[name] for name in ("phases", "by_phase_category")}


@pytest.mark.full
@pytest.mark.parametrize("backend", ["gather", "packed"])
def test_chunks_left_out_hold_no_more_than_those_traced(backend, monkeypatch):
    monkeypatch.setattr(span, "ELEMENTS", 1 << 13)
    monkeypatch.setattr(packed, "ELEMENTS", 1 << 18)
    monkeypatch.setattr(gather, "ELEMENTS", {"cpu": 1 << 18})
    spec = cell("cpu_test", backend, 260, 1)
    few = trace.trace(spec)
    monkeypatch.setattr(trace, "CHUNKS", 10**6)
    every = trace.trace(spec)
    assert every.operators > 1.2 * few.operators
    assert peaks(few) == peaks(every)


def test_few_of_a_range_are_its_ends_and_its_middle():
    assert list(trace.few(0, 6, 1)) == [0, 1, 2, 3, 4, 5]
    assert list(trace.few(0, 1000, 10)) == [0, 10, 500, 970, 980, 990]


REPEATED = [
    cell("cpu_test", "masked", 50, 5),
    cell("cpu_test", "packed", 40, 5, checkpoint="all", precision="bf16"),
    cell("cpu_test", "dense sdpa", 100, 10, checkpoint="0:5"),
    cell("cpu_test", "triton", 256, 6, precision="bf16", device="cuda"),
    cell("cpu_test", "dense sdpa", 256, 6, precision="bf16", device="cuda", checkpoint="1:"),
]


@pytest.mark.full
@pytest.mark.parametrize("spec", REPEATED, ids=lambda spec: spec.told(spec.backend, spec.device))
def test_layers_that_are_repeated_are_those_that_would_have_been_traced(spec):
    gpu = gpu_named("H200") if spec.device == "cuda" else None
    found, how = whole(spec, gpu)
    every = trace.trace(spec, gpu)
    assert "layers traced, one in the middle repeated" in how
    assert peaks(found) == peaks(every)
    assert saved(found) == saved(every)


def test_of_each_run_of_like_layers_four_are_left():
    short = layers.shortened(cell("production", "masked", 64, 12, checkpoint="2:9"))
    assert (short.spec.layers, short.spec.checkpoint) == (9, "2:6")
    assert short.like == (0, 1, 2, 3, 3, 3, 3, 4, 5, 6, 7, 8)
    assert layers.shortened(cell("production", "masked", 64, 4)) is None


def test_layers_that_are_not_alike_are_all_traced(monkeypatch):
    from nsa.model.llama import Block

    plain = Block._forward

    def unlike(self, x, *context):
        return plain(self, x * 1.0 if self.index == 2 else x, *context)

    monkeypatch.setattr(Block, "_forward", unlike)
    spec = cell("cpu_test", "dense sdpa", 64, 6)
    found, how = whole(spec)
    assert how == "traced, for of a few layers layer 2 is not like layer 1"
    assert peaks(found) == peaks(trace.trace(spec))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["masked", "gather", "packed", "sdpa"])
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.long), "cuda"])
def test_a_long_and_deep_cell_is_told_by_few_operators(backend, device):
    spec = cell("production", backend, 16384, 12, device=device)
    found, _ = whole(spec, gpu_named("H200") if device == "cuda" else None)
    assert found.operators < 35_000  # 50 to 60 us each on an idle core


def test_nothing_that_goes_after_the_step_is_in_the_stream():
    found = trace.trace(cell("cpu_test", "dense sdpa", 32, 1))
    assert found.stream.tags[-1][0] == len(found.stream)


@pytest.mark.full
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("backend", ["packed", "gather", "masked"])
def test_what_goes_straight_to_a_meta_kernel_makes_the_same(device, backend, monkeypatch):
    spec = cell("cpu_test", backend, 70, 1, device=device, precision="bf16", checkpoint="all")
    gpu = gpu_named("NVIDIA H200") if device == "cuda" else None
    quick = trace.trace(spec, gpu)
    monkeypatch.setattr(pretend, "_kind", lambda func: "")
    slow = trace.trace(spec, gpu)
    assert quick.stream.sizes == slow.stream.sizes
    assert quick.stream.marks == slow.stream.marks
    assert peaks(quick) == peaks(slow)
