"""The speed that a job prints, on a clock that the steps themselves move."""

from array import array
from types import SimpleNamespace

import pytest

from workbook.rooms.training.speed import LEFT_OUT, Speed


class Training:
    """A trainer whose steps take what `seconds(step)` says, and whose loader waits `wait(step)`."""

    config = SimpleNamespace(batch=4, tokens=100)

    def __init__(self, seconds, wait=lambda step: 0.0, first=0):
        self.steps_done, self.now, self.losses = first, 0.0, []
        self.seconds, self.wait = seconds, wait
        self.data = SimpleNamespace(waits_s=array("d"), batches=0)

    def run(self, steps):
        for _ in range(steps):
            self.data.waits_s.append(self.wait(self.steps_done))
            self.data.batches += 1
            self.now += self.seconds(self.steps_done)
            self.losses.append((self.steps_done, self.now))
            self.steps_done += 1

    def to(self, end, profiled=range(0), between=7.0):
        speed = Speed(self, self.data, profiled, clock=lambda: self.now)
        while self.steps_done < end:
            now = self.steps_done
            with speed.stretch():
                self.run(min(end, now + 50, *speed.borders(now)) - now)
            self.now += between  # an evaluation
        return speed.result()


def slow_at_first(step):
    return 30.0 if step < 3 else 0.25


def test_the_first_steps_are_left_out_and_a_recount_from_the_losses_agrees():
    training = Training(slow_at_first)
    found = training.to(70, between=0.0)
    (_, began), (_, ended) = training.losses[LEFT_OUT - 1], training.losses[-1]
    recount = 400 * len(training.losses[LEFT_OUT:]) / (ended - began)
    assert found["tokens_per_s"] == pytest.approx(recount, rel=0.01) == 1600
    assert found["speed"] == (
        "1,600 tokens/s over steps 21 to 70, without the first 20 (compile, capture, warm-up)"
    )
    assert found["timed_steps"] == 50 and found["timed_s"] == pytest.approx(12.5)


def test_what_lies_between_stretches_does_not_count():
    assert Training(slow_at_first).to(170)["tokens_per_s"] == pytest.approx(1600)


def test_a_job_too_short_to_tell_says_so_rather_than_a_number():
    found = Training(slow_at_first).to(20)
    assert found["tokens_per_s"] is None
    assert found["speed"].startswith("not measured: steps 1 to 20 are all among the first 20")
    assert Training(slow_at_first).to(21)["tokens_per_s"] == pytest.approx(1600)


def test_a_resumed_job_warms_up_again():
    found = Training(lambda step: 30.0 if step < 103 else 0.25, first=100).to(150)
    assert found["tokens_per_s"] == pytest.approx(1600)
    assert "over steps 121 to 150" in found["speed"]


def test_profiled_steps_do_not_count():
    training = Training(lambda step: 9.0 if step in (30, 31) else slow_at_first(step))
    found = training.to(60, profiled=range(30, 32))
    assert found["tokens_per_s"] == pytest.approx(1600)
    assert found["speed"].endswith("warm-up) and steps 31 to 32 (profiled)")


def test_waiting_for_data_is_told_by_quantiles_where_it_is_noticed():
    def wait(step):
        return 0.02 if step % 10 == 9 else 0.001

    found = Training(lambda step: 0.25, wait=wait).to(70)
    assert found["waits"] == {
        "p50_ms": pytest.approx(1.0),
        "p95_ms": pytest.approx(20.0),
        "max_ms": pytest.approx(20.0),
        "share": pytest.approx((5 * 0.02 + 45 * 0.001) / 12.5),
    }
    assert found["loader"] == "waited for: p50 1 ms, p95 20 ms, max 20 ms, 1.2% of a step"
    fast = Training(lambda step: 0.25, wait=lambda step: 0.002).to(70)
    assert fast["loader"] is None and fast["waits"]["p95_ms"] == pytest.approx(2.0)


def test_the_very_first_batch_which_nobody_could_draw_ahead_is_not_held_against_the_loader():
    found = Training(lambda step: 0.25, wait=lambda step: 5.0 * (step == 0)).to(5)
    assert found["waits"]["max_ms"] == 0.0 and found["loader"] is None
