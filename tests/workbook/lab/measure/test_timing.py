"""Interleaved A/B, on clocks that only the steps move on: real ones wait for a busy machine too."""

import contextlib
import gc
import time

import pytest
import torch

from workbook.lab.measure.timing import ROW_MS, ROWS, in_a_row, interleaved


class Trainer:
    """Every step takes 4 ms of the processor, watched ones 6 and a wait of 6 more, and the first
    watched one of a turn 40."""

    def __init__(self):
        self.device, self.steps_done = torch.device("cpu"), 0
        self.watched, self.processor_ms, self.waited_ms = [], 0.0, 0.0
        self.is_watched = self.new = False

    @contextlib.contextmanager
    def watching(self):
        self.new = self.is_watched = True
        yield
        self.is_watched = False

    def step(self, number):
        assert number == self.steps_done
        self.steps_done += 1
        self.watched.append(self.is_watched)
        self.processor_ms += 4 + 2 * self.is_watched + 34 * self.new
        self.waited_ms += 6 * self.is_watched
        self.new = False


@pytest.fixture
def trainer(monkeypatch):
    made = Trainer()
    monkeypatch.setattr(time, "process_time", lambda: made.processor_ms / 1e3)
    monkeypatch.setattr(time, "perf_counter", lambda: (made.processor_ms + made.waited_ms) / 1e3)
    return made


def test_a_watched_step_is_held_against_one_that_is_not_without_what_is_paid_once(trainer):
    found = interleaved(trainer, trainer.watching, rounds=3, steps=4)
    assert (found.plain_ms, found.watched_ms) == (pytest.approx(4), pytest.approx(6))
    assert (found.ratio, found.clock) == (pytest.approx(1.5), "processor time")


def test_by_the_wall_a_wait_counts(trainer):
    found = interleaved(trainer, trainer.watching, rounds=1, steps=3, wall=True)
    assert (found.ratio, found.clock) == (pytest.approx(3), "until the device is done")


def test_turns_change_their_order_and_leave_no_step_out(trainer):
    interleaved(trainer, trainer.watching, rounds=1, steps=2)
    # a round more, and a step more each turn
    assert trainer.watched == [*[True] * 3, *[False] * 3, *[False] * 3, *[True] * 3]


class Hoarder(Trainer):
    """Each step makes a sixteenth of all objects there are anew, and keeps them."""

    def __init__(self):
        super().__init__()
        self.share, self.kept, self.stepping = len(gc.get_objects()) // 16, [], False

    def step(self, number):
        self.stepping = True
        self.kept.append([[] for _ in range(self.share)])
        self.steps_done += 1
        self.stepping = False


@pytest.mark.full
def test_no_full_collection_of_garbage_falls_into_a_step():
    trainer, found = Hoarder(), []

    def note(phase, about):
        if phase == "start" and about["generation"] == 2:
            found.append(trainer.stepping)

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(100, 2, 2)
    try:
        interleaved(trainer, contextlib.nullcontext, rounds=1, steps=2)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert found and not any(found)


def test_calls_in_a_row_fill_a_sample_and_one_of_them_is_told(monkeypatch):
    ms = []
    monkeypatch.setattr(time, "perf_counter", lambda: sum(ms) / 1e3)
    found = in_a_row(lambda: ms.append(0.5), torch.device("cpu"))
    assert (found.q20, found.median, found.q80) == pytest.approx((0.5, 0.5, 0.5))
    assert len(ms) == 1 + ROWS * ROW_MS / 0.5
