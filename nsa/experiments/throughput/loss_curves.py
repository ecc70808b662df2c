"""Training losses step by step, the same batches for every backend and seed."""

import math
from collections.abc import Sequence
from pathlib import Path

from nsa.attention.registry import Declined
from nsa.experiments.throughput.cell import TrainCell
from nsa.lab import sweep
from nsa.lab.measure.recorders import MemorySamples
from nsa.lab.process import gpus
from nsa.lab.process.trial import Outcome

ENTRY = "nsa.experiments.throughput.loss_curves:train"
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

    A cell's `steps` are all there are, with a cosine schedule down to 0. Each seed is trained in a
    child process of its own, within `deadline_s`; where one breaks off, the row keeps the others'
    losses and has its outcome. Times are not taken, so `workers` of them may run at once: for
    "cuda" that many on each visible GPU, whose memory they then share. ValueError without a seed.
    """
    seeds = tuple(dict.fromkeys(seeds))
    if cells and not seeds:
        raise ValueError("seeds=[] trains nothing; each is a whole number from 0 on, as in [1, 2]")
    on_gpu = any(cell.device == "cuda" for cell in cells)
    asked = [(cell, seed) for cell in cells for seed in seeds]
    ended = sweep.measure(
        ENTRY,
        asked,
        lambda one, s: {"cell": one[0].to_dict(), "seed": one[1], "threads": threads},
        deadline_s=deadline_s,
        budget_s=budget_s,
        workers=workers,
        gpus=gpus.Gpus(gpus.all_visible().names * workers if on_gpu else ()),
        folder=folder,
        name=lambda one: f"{one[0]} seed {one[1]}",
        said=lambda result: f"last loss {result['losses'][-1]:.4f}",
        progress=progress,
    )
    each = len(seeds)
    return [
        _row(cell, dict(zip(seeds, ended[number * each :], strict=False)))
        for number, cell in enumerate(cells)
    ]


def _row(cell: TrainCell, curves: dict[int, Outcome]) -> dict:
    """The cell's row from how its seeds ended."""
    row = {**cell.to_dict(), "name": cell.name, "variant": VARIANT, "timing": "none"}
    row |= {"outcome": "ok", "message": ""}
    broken = [(seed, curve) for seed, curve in curves.items() if curve.status != "ok"]
    for seed, curve in broken[:1]:
        row |= {"outcome": curve.status, "message": f"seed {seed}: {curve.message}"}
    found = {seed: curve.result or {} for seed, curve in curves.items()}
    first = next(iter(found.values()))
    row |= {name: first.get(name, []) for name in ("device_mib", "host_mib")}
    row["seconds"] = sum(curve.seconds for curve in curves.values())
    losses = {str(seed): curve.get("losses") for seed, curve in found.items()}
    row["losses"] = {seed: nats for seed, nats in losses.items() if nats}
    return row


def train(spec: dict) -> dict:
    """The inside of a child: {"losses", "device_mib", "host_mib"} of one seed, each a list with a
    number a step, or {"declined": why}."""
    cell = TrainCell.from_dict(spec["cell"])
    warmup = min(10, max(1, cell.steps // 10))
    changes = {"steps": cell.steps, "schedule": "cosine", "warmup_steps": warmup}
    with cell.opened(spec.get("threads"), seed=spec["seed"], **changes) as trainer:
        memory = MemorySamples(trainer.device)
        trainer.observers = (memory,)
        try:
            losses = trainer.run(cell.steps)
        except Declined as refusal:
            return {"declined": str(refusal)}
    return {"losses": losses, "device_mib": memory.device_mib, "host_mib": memory.host_mib}
