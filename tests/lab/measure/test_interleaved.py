import contextlib
import gc
import time

import pytest
import torch

from nsa.lab.measure.timing import interleaved


class Trainer:
    """Every step takes 4 ms of the processor, watched ones 6, and the first of those 40 more."""

    def __init__(self):
        self.device, self.steps_done = torch.device("cpu"), 0
        self.numbers, self.watched = [], []
        self.is_watched = self.new = False

    @contextlib.contextmanager
    def watching(self):
        self.new, self.is_watched = True, True
        try:
            yield
        finally:
            self.is_watched = False

    def step(self, number):
        ms = 4 + 2 * self.is_watched + 40 * (self.is_watched and self.new)
        self.new = False
        end = time.process_time() + ms / 1e3
        while time.process_time() < end:
            pass
        self.numbers.append(number)
        self.watched.append(self.is_watched)
        self.steps_done += 1


@pytest.mark.full
def test_a_watched_step_is_held_against_one_that_is_not_without_what_is_paid_once():
    trainer = Trainer()
    found = interleaved(trainer, trainer.watching, rounds=3, steps=4)
    assert found.ratio == pytest.approx(1.5, rel=0.1)
    assert found.plain_ms == pytest.approx(4, rel=0.1)
    assert found.watched_ms == pytest.approx(6, rel=0.1)
    assert found.clock == "processor time"


def test_by_the_wall_a_wait_counts(monkeypatch):
    """On a wall clock that only the steps move on: a real one waits for a busy machine too."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Waiting(Trainer):
        def step(self, number):
            now[0] += 0.004 + 0.004 * self.is_watched
            self.steps_done += 1

    trainer = Waiting()
    found = interleaved(trainer, trainer.watching, rounds=1, steps=3, wall=True)
    assert found.ratio == pytest.approx(2)
    assert found.clock == "until the device is done"


@pytest.mark.full
def test_turns_change_their_order_and_leave_no_step_out():
    trainer = Trainer()
    interleaved(trainer, trainer.watching, rounds=1, steps=2)
    assert trainer.numbers == list(range(12))  # a round more, and a step more each turn
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
