import io
import json
import os
import signal
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from nsa.model.data import synthetic
from nsa.model.llama import LanguageModel
from nsa.model.presets import preset
from nsa.model.train import Trainer
from nsa.model.train_config import TrainConfig
from workbook.lab.observers import beat
from workbook.lab.observers.beat import DeviceMarks, Heartbeat, line

FIELDS = "ts iso pid rank step phase phase_s s_per_step eta_s loss loss_step mib"


def heartbeat(out=None, **options):
    """A heartbeat on a clock that stands still, whose thread never starts by itself."""
    clock = SimpleNamespace(now=1_000.0)
    made = Heartbeat(out, clock=lambda: clock.now, **options)
    made.start = lambda: None
    return made, clock


def steps(made, clock, count, seconds=2.0, first=0):
    for step in range(first, first + count):
        for name in ("data", "forward", "backward", "optimizer"):
            made.on_phase(name, step)
            clock.now += seconds / 4
        made.on_phase("end", step)


def test_a_stuck_step_says_its_phase_and_for_how_long():
    made, clock = heartbeat()
    made.on_phase("data", 5)
    made.on_phase("backward", 5)
    clock.now += 12.5
    found = made.beat()
    assert (found["step"], found["phase"], found["phase_s"]) == (5, "backward", 12.5)


class Full(io.StringIO):
    """A disk that is full at first."""

    failed = False

    def write(self, text):
        if not self.failed:
            self.failed = True
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_lines_come_from_inside_a_step_that_does_not_end_though_an_output_fails_once():
    made = Heartbeat(out := Full(), every_s=0.02)
    made.on_phase("data", 3)
    made.on_phase("backward", 3)
    end = time.monotonic() + 20
    while out.getvalue().count("step 3 backward") < 3:
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
    made.close()


def test_beats_are_at_most_every_s_apart_however_steps_fall():
    made, clock = heartbeat()
    times = []

    def wait(seconds):
        clock.now += seconds
        return len(times) == 50

    made._stop = SimpleNamespace(wait=wait)
    made.beat = lambda: times.append(clock.now)
    made._run()
    assert len(times) == 50
    assert max(b - a for a, b in pairwise(times)) <= 10.0


def test_the_thread_is_a_daemon_there_is_one_and_it_keeps_its_hands_off_signals(monkeypatch):
    asked = []
    for name in ("signal", "setitimer", "alarm"):
        monkeypatch.setattr(signal, name, lambda *args: asked.append(args))
    made = Heartbeat(None, every_s=60)
    made.start()
    made.on_phase("data", 0)
    (thread,) = (t for t in threading.enumerate() if t.name == "nsa:heartbeat")
    assert thread.daemon
    made.close()
    assert not thread.is_alive() and asked == []


def test_pace_is_the_median_from_step_to_step_and_eta_what_is_left():
    made, clock = heartbeat(total_steps=20)
    assert made.beat()["s_per_step"] is None
    steps(made, clock, 3)
    clock.now += 30.0  # an evaluation, once
    steps(made, clock, 4, first=3)
    found = made.beat()
    assert found["s_per_step"] == pytest.approx(2.0)
    assert found["eta_s"] == pytest.approx(2.0 * 13)
    made.on_phase("data", 7)
    clock.now += 1.5
    assert made.beat()["eta_s"] == pytest.approx(2.0 * 13 - 1.5)
    clock.now += 500.0  # a step that takes longer than others has not shortened the rest
    assert made.beat()["eta_s"] == pytest.approx(2.0 * 12)
    made.total_steps = None
    assert made.beat()["eta_s"] is None


class FakeGPU:
    """A device whose steps take `seconds` each and that works off what the host has issued."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.free_at, self.waiting = clock, seconds, 0.0, []

    def issue(self, seconds=None):
        self.free_at = max(self.free_at, self.clock.now) + (seconds or self.seconds)

    def event(self, device):
        def elapsed_time(later):
            return 1e3 * (later.at - event.at)

        event = SimpleNamespace(at=self.free_at, elapsed_time=elapsed_time)
        return event

    # the Deferred of a heartbeat
    def __len__(self):
        return len(self.waiting)

    def put(self, key, loss):
        self.waiting.append((key, loss.cpu()))

    def ready(self):
        while self.waiting and self.waiting[0][0][1].at <= self.clock.now:
            yield self.waiting.pop(0)


class CudaLoss:
    """A loss that says it is on a GPU."""

    is_cuda, device = True, None

    def cpu(self):
        return torch.tensor(5.0)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A heartbeat, its clock, and a loop whose host is ahead of a GPU with steps of 0.07 s."""
    made, clock = heartbeat(total_steps=1000)
    gpu = FakeGPU(clock, 0.07)
    made._losses = gpu
    monkeypatch.setattr(beat, "mark", gpu.event)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)

    def run(first, count, warmup=None):
        for step in range(first, first + count):
            made.on_phase("data", step)
            made.on_phase("graph", step)
            clock.now += 0.004
            gpu.issue(warmup)
            made.on_phase("end", step)
            made.on_step(step, CudaLoss())
        clock.now = max(clock.now, gpu.free_at)  # as at the end of a run, which waits

    return made, clock, run


def test_on_a_gpu_the_pace_is_the_gpus_though_the_host_is_far_ahead(on_a_gpu):
    made, _clock, run = on_a_gpu
    run(0, 3, warmup=8.0)  # compile and capture
    for first in range(3, 303, 50):
        run(first, 50)
    made.on_phase("data", 303)
    made.on_step(303, CudaLoss())
    found = made.beat()
    assert found["s_per_step"] == pytest.approx(0.07, rel=0.01)
    assert found["eta_s"] == pytest.approx(0.07 * (1000 - 303), rel=0.01)


def test_in_the_middle_of_a_stretch_the_eta_counts_what_the_gpu_has_done(on_a_gpu):
    made, clock, run = on_a_gpu
    run(0, 100)
    run(100, 50)
    ended = clock.now - 0.5 * 50 * 0.07  # the host waits, and the GPU is half through
    clock.now = ended
    assert made.beat()["eta_s"] == pytest.approx(0.07 * (1000 - 125), rel=0.02)


def test_before_two_losses_have_arrived_there_is_no_pace_of_a_gpu(on_a_gpu):
    made, _clock, run = on_a_gpu
    run(0, 1)
    assert made.beat()["s_per_step"] is None and made.beat()["eta_s"] is None


def test_a_short_run_has_a_pace_after_a_few_steps(on_a_gpu):
    made, _clock, run = on_a_gpu
    for step in range(4):
        run(step, 1)
    assert made.beat()["s_per_step"] == pytest.approx(0.07, rel=0.1)


def test_a_mark_counts_when_it_happened_however_late_it_is_noticed():
    clock = SimpleNamespace(now=0.0)
    marks = DeviceMarks(lambda: clock.now)
    # (step, seconds on the device's clock, the host's clock as it is noticed)
    for step, at, noticed in ((0, 0.0, 105.0), (1, 8.0, 108.0), (2, 16.0, 116.0), (52, 19.5, 180)):
        clock.now = noticed
        event = SimpleNamespace(at=at)
        event.elapsed_time = lambda later, first=event: 1e3 * (later.at - first.at)
        marks.arrived(step, event)
    # two slow steps weigh as two among fifty; the device's 0 is the host's 100
    assert marks.pace == (pytest.approx(0.07), 53, pytest.approx(119.5))


def test_the_file_holds_one_object_a_beat_and_goes_on_where_it_ended(tmp_path):
    for _ in range(2):
        made, _clock = heartbeat(file=tmp_path / "beat.jsonl")
        made.rank = 1
        made.beat()
        made.close()
    beats = [json.loads(text) for text in (tmp_path / "beat.jsonl").read_text().splitlines()]
    assert len(beats) == 2
    assert list(beats[0]) == FIELDS.split()
    assert beats[0]["pid"] == os.getpid() and beats[0]["rank"] == 1
    assert beats[0]["iso"] == "1970-01-01T00:16:40.000+00:00"
    assert beats[0]["mib"] > 10


def test_the_loss_is_told_when_it_has_arrived_and_not_before(monkeypatch):
    made, clock = heartbeat()
    ready = made._losses.ready
    monkeypatch.setattr(made._losses, "ready", lambda: iter(()))
    made.on_step(0, torch.tensor(5.5))
    clock.now += 10
    made.on_step(1, torch.tensor(5.25))
    assert made.beat()["loss"] is None
    assert len(made._losses) == 1  # nor do copies pile up
    monkeypatch.setattr(made._losses, "ready", ready)
    made.on_step(2, torch.tensor(5.0))
    found = made.beat()
    assert (found["loss"], found["loss_step"]) == (5.5, 0)


def test_the_trainer_tells_the_end_and_the_rank():
    made, _ = heartbeat()
    trainer = SimpleNamespace(
        config=SimpleNamespace(steps=500), parallel=SimpleNamespace(rank=3), device="cpu"
    )
    made.on_start(trainer)
    assert (made.total_steps, made.rank) == (500, 3)
    mine, _ = heartbeat(total_steps=9)
    mine.on_start(trainer)
    assert (mine.total_steps, mine.rank) == (9, 3)


def test_a_line_is_for_people():
    made, clock = heartbeat(total_steps=500)
    steps(made, clock, 3)
    made.on_step(2, torch.tensor(5.5))
    made.on_step(3, torch.tensor(5.4))
    found = made.beat() | {"mib": 2310.4}
    assert line(found, 500) == (
        "00:16:46 rank 0 · step 2/500 end 0.0 s · 2 s/step · ETA 0:16:34 · loss 5.5000 (step 2) · "
        "2310 MiB"
    )
    out = io.StringIO()
    heartbeat(out, detail=lambda: "in blocks.3.attention")[0].beat()
    assert out.getvalue().endswith(" · in blocks.3.attention\n")


def test_a_pace_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"every_s=0 must be greater than 0; 10 is usual"):
        Heartbeat(every_s=0)


def test_where_proc_tells_nothing_neither_does_it(monkeypatch):
    monkeypatch.setattr(beat.Path, "read_text", lambda self: "")
    assert heartbeat()[0].beat()["mib"] is None


@pytest.mark.gpu
def test_with_a_cuda_graph_the_pace_is_that_of_the_clock_on_the_wall():
    config = TrainConfig(batch=4, tokens=512, precision="bf16", cuda_graph=True, steps=500)
    made = Heartbeat(None, every_s=0.1)
    model = LanguageModel(preset("cpu_test", layers=4, dim=512))
    trainer = Trainer(model, synthetic(), config, device="cuda", observers=[made])
    trainer.run(20)
    began = time.perf_counter()
    trainer.run(50)  # ends when the device has
    wall = (time.perf_counter() - began) / 50
    trainer.run(1)
    pace, host = made.beat()["s_per_step"], sorted(made._seconds)[len(made._seconds) // 2]
    trainer.close()
    assert pace == pytest.approx(wall, rel=0.10), f"the host's steps took {host:.4f} s"
