"""What it costs a step to be watched by every observer that stays on for a whole run."""

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsa.lab.measure.interleaved import turns
from nsa.lab.observers.arrival import GradientArrival
from nsa.lab.observers.attention_stats import AttentionStats
from nsa.lab.observers.beat import Heartbeat
from nsa.lab.observers.kept import SAMPLED
from nsa.lab.observers.module_order import ModuleOrder
from nsa.lab.observers.phases import PhaseTimes
from nsa.lab.observers.writers import CsvWriter
from nsa.model.train import Trainer

ROUNDS, TURN = 5, SAMPLED  # steps of a turn: whoever samples looks at one of them


def observing(trainer: Trainer) -> dict[str, float]:
    """{"watched_ms", "unwatched_ms", "watched_times"} of a step, with all observers and with none.

    See `turns`. As in a long run, the heartbeat, times by phase and losses are of every step,
    gradients' arrival and the modules' order of every tenth, and so, five times as often as there,
    the attention's statistics.
    """
    found = turns(trainer, lambda: _all_observers(trainer), rounds=ROUNDS, steps=TURN)
    return {
        "unwatched_ms": found.plain_ms,
        "watched_ms": found.watched_ms,
        "watched_times": found.ratio,
    }


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
