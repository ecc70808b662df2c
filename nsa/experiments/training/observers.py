"""Observers by the names that `nsa train --observe` knows, and what they leave in a folder."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa.workbook.files import write_json

WRITERS = ("csv", "tensorboard")
NAMES = (*WRITERS, "arrival", "buckets", "modules", "phases", "stats")


def check(names: Sequence[str], kind: str) -> None:
    """Raises ValueError for names unknown, and for DDP's buckets where there is no DDP."""
    for name in names:
        if name not in NAMES:
            raise ValueError(f"no observer {name!r}; there are {', '.join(NAMES)}")
    if "buckets" in names and kind != "ddp":
        raise ValueError(f"buckets are DDP's; parallel={kind!r} has none, parallel='ddp' would do")


def make(names: Sequence[str], trainer: Any, folder: Path, every: int) -> dict[str, Any]:
    """This rank's observers by name: always a heartbeat, whose lines rank 0 prints.

    Arrival and modules look at the first step and every `every`-th after it. The writers are rank
    0's.
    """
    from nsa.lab.observers import beat

    rank = trainer.parallel.rank
    made: dict[str, Any] = {
        "heartbeat": beat.Heartbeat(
            out=sys.stderr if rank == 0 else None,
            file=folder / f"beats{rank}.jsonl",
            total_steps=trainer.config.steps,
        )
    }
    writers = {name: _writer(name, folder) for name in names if name in WRITERS and rank == 0}
    for name in names:
        if name not in WRITERS:
            made[name] = _watcher(name, trainer, list(writers.values()), every)
    return made | writers  # last, so that what the others still hand them is written


def write_rows(observers: Mapping[str, Any], rank: int, folder: Path) -> None:
    """<name>-rank<r>.json of the observers that kept rows; of those by step, the last looked at."""
    for name, observer in observers.items():
        rows = getattr(observer, "rows", None) or getattr(observer, "table", None)
        if rows is not None:
            write_json(folder / f"{name}-rank{rank}.json", rows())


def _writer(name: str, folder: Path) -> Any:
    from nsa.lab.observers import writers

    if name == "csv":
        return writers.CsvWriter(folder / "observed.csv")
    return writers.TensorBoardWriter(folder / "tensorboard")


def _watcher(name: str, trainer: Any, writers: list[Any], every: int) -> Any:
    if name == "arrival":
        from nsa.lab.observers.arrival import GradientArrival

        return GradientArrival(trainer.model, every=every, keep=1)
    if name == "modules":
        from nsa.lab.observers.module_order import ModuleOrder

        return ModuleOrder(trainer.model, every=every, keep=1)
    if name == "phases":
        from nsa.lab.observers.phases import PhaseTimes

        return PhaseTimes(trainer.device)
    if name == "stats":
        from nsa.lab.observers.attention_stats import AttentionStats

        return AttentionStats(trainer.model, writers=writers)
    from nsa.lab.observers.ddp import BucketTrace

    return BucketTrace(trainer.wrapped)
