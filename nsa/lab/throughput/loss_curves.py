"""Training losses step by step, the same batches for every backend and seed."""

import math
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from nsa.attention.registry import Declined
from nsa.lab.budget import Budget
from nsa.lab.supervision import gpus
from nsa.lab.throughput.memory_samples import MemorySamples
from nsa.lab.throughput.throughput_cell import TrainCell
from nsa.lab.throughput.training_session import session
from nsa.lab.trial import run_child

ENTRY = "nsa.lab.throughput.loss_curves:train_seeds"
VARIANT = "curve"


def measure(
    cells: Sequence[TrainCell],
    seeds: Sequence[int],
    *,
    deadline_s: float,
    budget_s: float = math.inf,
    threads: int | None = None,
    workers: int = 1,
    folder: str | Path | None = None,
    progress: bool = True,
) -> list[dict]:
    """One row a cell: its fields, `outcome`, `message`, `seconds`, `losses` {seed: nats} and, of
    the first seed, `device_mib` and `host_mib` after each step.

    A cell's `steps` are all there are, with a cosine schedule down to 0. Its seeds are trained one
    after the other in one child process. Times are not taken, so `workers` cells may run at once on
    a CPU; of cells for "cuda" one runs on each visible GPU.
    """
    budget, done, stop = Budget(budget_s), 0, threading.Event()
    on_gpu = any(cell.device == "cuda" for cell in cells)
    lent = gpus.all_visible() if on_gpu else gpus.Gpus()

    def one(gpu: str | None, numbered: tuple[int, TrainCell]) -> dict:
        nonlocal done
        number, cell = numbered
        left = budget.share(deadline_s)
        row = {**cell.to_dict(), "name": cell.name, "variant": VARIANT, "seconds": 0.0}
        row |= {"losses": {}, "device_mib": [], "host_mib": [], "timing": "none"}
        if left <= 0:
            row |= {"outcome": "not run", "message": budget.used_up}
        else:
            name = f"{number:03d}-{re.sub('[^A-Za-z0-9.=]+', '-', str(cell))}"
            spec = {"cell": cell.to_dict(), "seeds": list(seeds), "threads": threads}
            ended = run_child(
                ENTRY,
                spec,
                deadline_s=left,
                folder=None if folder is None else Path(folder, name),
                env=gpus.only(gpu),
                stop=stop,
            )
            outcome, message = budget.judged(ended.status, ended.message, left, deadline_s)
            row |= {"outcome": outcome, "message": message, "seconds": ended.seconds}
            found = ended.result or {}
            if "declined" in found:
                row |= {"outcome": "declined", "message": found["declined"]}
            else:
                row |= found
        done += 1
        if progress:
            last = ", ".join(f"{losses[-1]:.4f}" for losses in row["losses"].values())
            said = f"{cell}: {row['outcome']}, {row['seconds']:.1f} s, last losses {last}"
            print(f"[{done}/{len(cells)}] {said}", file=sys.stderr, flush=True)
        return row

    return lent.map(one, enumerate(cells), 1 if on_gpu else workers, stop=stop)


def train_seeds(spec: dict) -> dict:
    """The inside of a child: {"losses": ..., "device_mib": ..., "host_mib": ...} as `measure` has
    them, or {"declined": why}."""
    cell, losses, memory = TrainCell.from_dict(spec["cell"]), {}, None
    warmup = min(10, max(1, cell.steps // 10))
    for seed in spec["seeds"]:
        changes = {"seed": seed, "steps": cell.steps, "schedule": "cosine", "warmup_steps": warmup}
        with session(cell, spec.get("threads"), **changes) as trainer:
            if memory is None:
                memory = MemorySamples(trainer.device)
                trainer.observers = (memory,)
            try:
                losses[str(seed)] = trainer.run(cell.steps)
            except Declined as refusal:
                return {"declined": str(refusal)}
    return {"losses": losses, "device_mib": memory.device_mib, "host_mib": memory.host_mib}
