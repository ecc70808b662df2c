"""A run that stands still is told by its own pace, and a slow one is not."""

import threading
import time
from types import SimpleNamespace

import pytest
from observed import trainer

from workbook.lab.observers import watchdog
from workbook.lab.observers.watchdog import Watchdog


@pytest.fixture
def dog(tmp_path):
    clock = SimpleNamespace(now=1000.0)
    made = Watchdog(tmp_path / "stall.txt", rank=1, clock=lambda: clock.now)
    made.pass_ = lambda seconds, every=10.0: passing(made, clock, seconds, every)
    return made


def passing(dog, clock, seconds, every):
    """Time goes by, and the thread would look now and then."""
    for _ in range(int(seconds / every)):
        clock.now += every
        dog.check()


def train(dog, step, seconds):
    for phase, share in (("data", 0.0), ("forward", 0.3), ("backward", 0.6), ("optimizer", 0.1)):
        dog.on_phase(phase, step)
        dog.pass_(share * seconds)
    dog.on_phase("end", step)


def test_a_slow_run_that_goes_on_is_not_told_of(dog, capsys):
    for step in range(6):
        train(dog, step, 400.0 if step % 2 else 1500.0)
    assert dog.reports == [] and capsys.readouterr().err == ""


def test_a_step_that_takes_many_times_the_slowest_is_told_once_with_its_place(
    dog, tmp_path, capsys
):
    for step in range(3):
        train(dog, step, 400.0)
    dog.on_phase("data", 3)
    dog.on_phase("backward", 3)
    dog.pass_(1990.0)
    assert dog.reports == [], "five times 400 s are not over"
    dog.pass_(5000.0)
    (report,) = dog.reports
    assert (report["step"], report["phase"], report["rank"]) == (3, "backward", 1)
    assert (report["bound_s"], report["seconds"]) == (2000.0, 2010.0)
    said = capsys.readouterr().err
    assert "rank 1: step 3 stands still in 'backward': 2010 s" in said and "whyhung attach" in said
    assert "step 3, backward" in (tmp_path / "stall.txt").read_text()
    dog.on_phase("data", 4)
    assert report["lasted_s"] == 6990.0 and "went on after 6990 s" in capsys.readouterr().err


def test_neither_a_first_step_nor_what_lies_aside_of_steps_is_judged(dog):
    dog.on_phase("data", 0)
    dog.pass_(50_000.0, every=1000.0)
    assert dog.bound_s() is None and dog.reports == []
    train(dog, 1, 20.0)
    dog.on_phase("data", 2)
    dog.on_phase("end", 2)
    with dog.aside():
        dog.pass_(400_000.0, every=10_000.0)
    dog.pass_(400_000.0, every=10_000.0)
    assert dog.reports == []
    dog.on_phase("data", 3)
    assert dog.bound_s() == 5 * 50_000.0, "what lies aside is no pace"


def test_short_steps_may_take_a_minute_and_the_first_one_is_forgotten(dog):
    for step in range(60):
        train(dog, step, 500.0 if step == 0 else 1.0)
    assert dog.bound_s() == watchdog.LEAST_S


def test_a_stall_is_told_from_inside_of_a_step_with_the_stacks_of_where_it_stands(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(watchdog, "LEAST_S", 0.5)  # longer than a collection of garbage
    monkeypatch.setattr(watchdog, "FACTOR", 1.5)
    monkeypatch.setattr(watchdog, "POLL_S", 0.01)
    dog = Watchdog(tmp_path / "stall.txt")

    class Stands:
        at = None

        def on_phase(self, name, step):
            told = {r["step"] for r in dog.reports}
            if name == "backward" and step >= 3 and self.at is None and step not in told:
                until = time.monotonic() + 30
                while step not in {r["step"] for r in dog.reports} and time.monotonic() < until:
                    time.sleep(0.01)
                self.at = step

    stands = Stands()
    training = trainer(dog, stands)
    while stands.at is None and training.steps_done < 20:  # a busy machine may stall before it
        training.run(4)
    training.close()
    assert stands.at in {report["step"] for report in dog.reports}
    assert "in on_phase" in (tmp_path / "stall.txt").read_text()
    assert not any(thread.name == "nsa:watchdog" for thread in threading.enumerate())
