"""A step that is watched and one that is not, timed in turn."""

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from nsa.lab.measure.timing import wait
from nsa.model.train import Trainer


@dataclass(frozen=True)
class Turns:
    """ms of a step, plain and watched, the median of the rounds' ratios, and what was timed."""

    plain_ms: float
    watched_ms: float
    ratio: float
    clock: str


def turns(
    trainer: Trainer,
    watching: Callable[[], AbstractContextManager],
    *,
    rounds: int,
    steps: int,
    wall: bool = False,
) -> Turns:
    """Times `steps` steps inside `watching()` and as many outside, in `rounds` rounds.

    Both take turns, in changing order, so that a machine that slows down slows both. From idle
    device to idle device; without one processor time of all threads counts, for its cores are
    shared, but not if `wall`: a wait for another rank takes none.

    Not timed are one round before and the first step of every turn: what watching learns in its
    first step, and whatever the change of turns costs, a training pays once. Nor is a full
    collection of Python's garbage, which takes longer than a step and would fall into any turn: one
    is made before each.
    """
    clock, name = time.process_time, "processor time"
    if wall or trainer.device.type == "cuda":
        clock, name = time.perf_counter, "until the device is done"

    def turn(watched: bool) -> float:
        gc.collect()
        with watching() if watched else nullcontext():
            trainer.step(trainer.steps_done)
            wait(trainer.device)
            began = clock()
            for step in range(trainer.steps_done, trainer.steps_done + steps):
                trainer.step(step)
            wait(trainer.device)
            return 1e3 * (clock() - began) / steps

    found = []
    for number in range(rounds + 1):
        order = (False, True) if number % 2 else (True, False)
        ms = {watched: turn(watched) for watched in order}
        found.append((ms[False], ms[True]))
    plain, watched = zip(*found[1:], strict=True)
    return Turns(
        statistics.median(plain),
        statistics.median(watched),
        statistics.median(b / a for a, b in found[1:]),
        name,
    )
