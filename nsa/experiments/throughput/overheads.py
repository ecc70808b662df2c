"""What of a step is being watched, and what is waiting for other ranks: the same steps without."""

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from nsa.lab.measure.timing import interleaved
from nsa.lab.observers.arrival import GradientArrival
from nsa.lab.observers.attention_stats import AttentionStats
from nsa.lab.observers.beat import Heartbeat
from nsa.lab.observers.deferred import SAMPLED
from nsa.lab.observers.module_order import ModuleOrder
from nsa.lab.observers.phases import PhaseTimes
from nsa.lab.observers.writers import CsvWriter
from nsa.model.parallel import Parallel
from nsa.model.train import Trainer

ROUNDS, TURN = 3, 5  # of communication; steps of a turn


def observing(trainer: Trainer) -> dict[str, float]:
    """{"watched_ms", "unwatched_ms", "watched_times"} of a step, with all observers and with none.

    See `interleaved`. As in a long run, the heartbeat, times by phase and losses are of every step,
    gradients' arrival and the modules' order of every tenth, and so, five times as often as there,
    the attention's statistics.
    """
    # An observer that samples looks at one step of each turn.
    found = interleaved(trainer, lambda: _all_observers(trainer), rounds=5, steps=SAMPLED)
    return {
        "unwatched_ms": found.plain_ms,
        "watched_ms": found.watched_ms,
        "watched_times": found.ratio,
    }


def communication_ms(trainer: Trainer) -> float:
    """ms that a step under DDP takes longer than one whose gradients stay on their rank.

    Both are interleaved, see `interleaved`. Less than 0 where it is smaller than what else differs
    between two turns. The ranks' weights differ afterwards; every rank must call it.
    """
    found = interleaved(trainer, lambda: unsynced(trainer), rounds=ROUNDS, steps=TURN, wall=True)
    return found.plain_ms * (1 - found.ratio)


@contextlib.contextmanager
def unsynced(trainer: Trainer) -> Iterator[None]:
    """The trainer's steps inside send no gradient."""
    kept = trainer.parallel
    trainer.parallel = _Unsynced(**{f.name: getattr(kept, f.name) for f in fields(kept) if f.init})
    try:
        yield
    finally:
        trainer.parallel = kept


class _Unsynced(Parallel):
    """None of its micro-batches is the last."""

    def micro(self, wrapped, last: bool):
        return super().micro(wrapped, False)


@contextlib.contextmanager
def _all_observers(trainer: Trainer) -> Iterator[None]:
    rank, before = os.environ.get("RANK", "0"), trainer.observers
    with tempfile.TemporaryDirectory() as folder:
        writer = CsvWriter(Path(folder, f"losses-{rank}.csv"))
        observers: tuple[Any, ...] = (
            Heartbeat(io.StringIO(), file=Path(folder, f"beat-{rank}.jsonl")),
            GradientArrival(trainer.model, every=SAMPLED),
            ModuleOrder(trainer.model, every=SAMPLED),
            AttentionStats(trainer.model, every=SAMPLED, writers=[writer]),
            PhaseTimes(trainer.device),
            writer,
        )
        trainer.observers = observers
        try:
            yield
        finally:
            trainer.close()
            trainer.observers = before
