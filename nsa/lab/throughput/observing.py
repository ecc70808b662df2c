"""What it costs a step to be watched by every observer that stays on for a whole run."""

import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsa.lab.observers.arrival import GradientArrival
from nsa.lab.observers.attention_stats import AttentionStats
from nsa.lab.observers.beat import Heartbeat
from nsa.lab.observers.module_order import ModuleOrder
from nsa.lab.observers.phases import PhaseTimes
from nsa.lab.observers.writers import CsvWriter
from nsa.lab.speed.timing import wait
from nsa.model.train import Trainer

ROUNDS, TURN = 3, 10  # steps of a turn: one of them has the attention's statistics
STATISTICS_EVERY = 10


def observing(trainer: Trainer) -> dict[str, float]:
    """{"watched_ms", "unwatched_ms", "watched_times"} of a step, with all observers and with none.

    Both take turns, so that a machine that slows down slows both; watched_times is the median of
    the rounds' ratios. From idle device to idle device; without one processor time counts, for its
    cores are shared. Observed are the heartbeat, gradients' arrival, the modules' order, times by
    phase and losses in every step, the attention's statistics in every tenth.
    """
    _turn(trainer)
    pairs = []
    for _ in range(ROUNDS):
        plain = _turn(trainer)
        with _all_observers(trainer):
            pairs.append((plain, _turn(trainer)))
    plain, watched = zip(*pairs, strict=True)
    return {
        "unwatched_ms": statistics.median(plain),
        "watched_ms": statistics.median(watched),
        "watched_times": statistics.median(b / a for a, b in pairs),
    }


def _turn(trainer: Trainer) -> float:
    """ms a step."""
    on_gpu = trainer.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    wait(trainer.device)
    began = clock()
    for step in range(trainer.steps_done, trainer.steps_done + TURN):
        trainer.step(step)
    wait(trainer.device)
    return 1e3 * (clock() - began) / TURN


@contextlib.contextmanager
def _all_observers(trainer: Trainer) -> Iterator[None]:
    rank, before = os.environ.get("RANK", "0"), trainer.observers
    with tempfile.TemporaryDirectory() as folder:
        writer = CsvWriter(Path(folder, f"losses-{rank}.csv"))
        observers: tuple[Any, ...] = (
            Heartbeat(io.StringIO(), file=Path(folder, f"beat-{rank}.jsonl")),
            GradientArrival(trainer.model),
            ModuleOrder(trainer.model),
            AttentionStats(trainer.model, every=STATISTICS_EVERY, writers=[writer]),
            PhaseTimes(trainer.device),
            writer,
        )
        trainer.observers = observers
        try:
            yield
        finally:
            trainer.close()
            trainer.observers = before
