"""Training losses step by step, the same batches for every backend and seed."""

import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from nsa.attention.registry import Declined
from nsa.lab.throughput_cell import TrainCell
from nsa.lab.training_session import session
from nsa.lab.trial import run_child

ENTRY = "nsa.lab.loss_curves:train_seeds"


def measure(
    cells: Sequence[TrainCell],
    seeds: Sequence[int],
    *,
    deadline_s: float,
    budget_s: float = math.inf,
    threads: int | None = None,
    folder: str | Path | None = None,
    progress: bool = True,
) -> list[dict]:
    """One row a cell: its fields, `outcome`, `message`, `seconds` and `losses` {seed: nats}.

    All of a cell's `steps` count, warm-up included, with a cosine schedule to 0. A cell's seeds are
    trained one after the other in one child process; those that were not finished are not there.
    """
    end, rows = time.monotonic() + budget_s, []
    for number, cell in enumerate(cells):
        left = min(deadline_s, end - time.monotonic())
        row = {**cell.to_dict(), "name": cell.name, "seconds": 0.0, "losses": {}}
        if left <= 0:
            row |= {"outcome": "not run", "message": f"the budget of {budget_s:g} s was used up"}
        else:
            name = f"{number:03d}-{re.sub('[^A-Za-z0-9.=]+', '-', str(cell))}"
            spec = {"cell": cell.to_dict(), "seeds": list(seeds), "threads": threads}
            ended = run_child(
                ENTRY, spec, deadline_s=left, folder=None if folder is None else Path(folder, name)
            )
            row |= {"outcome": ended.status, "message": ended.message, "seconds": ended.seconds}
            found = ended.result or {}
            if "declined" in found:
                row |= {"outcome": "declined", "message": found["declined"]}
            row["losses"] = found.get("losses", {})
        rows.append(row)
        if progress:
            last = ", ".join(f"{losses[-1]:.4f}" for losses in row["losses"].values())
            said = f"{cell}: {row['outcome']}, {row['seconds']:.1f} s, last losses {last}"
            print(f"[{len(rows)}/{len(cells)}] {said}", file=sys.stderr, flush=True)
    return rows


def train_seeds(spec: dict) -> dict:
    """{"losses": {seed: [nats, ...]}}, or {"declined": why}; runs in a child process."""
    cell, losses = TrainCell.from_dict(spec["cell"]), {}
    warmup = min(10, max(1, cell.steps // 10))
    for seed in spec["seeds"]:
        changes = {"seed": seed, "steps": cell.steps, "schedule": "cosine", "warmup_steps": warmup}
        with session(cell, spec.get("threads"), **changes) as trainer:
            try:
                losses[str(seed)] = trainer.run(cell.steps)
            except Declined as refusal:
                return {"declined": str(refusal)}
    return {"losses": losses}
