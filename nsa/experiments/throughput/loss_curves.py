"""Training losses step by step, the same batches for every backend and seed."""

import math
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from nsa.attention.registry import Declined
from nsa.experiments.throughput.cell import TrainCell
from nsa.lab.measure.recorders import MemorySamples
from nsa.lab.process import gpus
from nsa.lab.process.trial import place_of, run_child
from nsa.lab.sweep import Budget

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
    budget, done, stop = Budget(budget_s), 0, threading.Event()
    on_gpu = any(cell.device == "cuda" for cell in cells)
    lent = gpus.Gpus(gpus.all_visible().names * workers if on_gpu else ())
    asked = [(number, cell, seed) for number, cell in enumerate(cells) for seed in seeds]

    def one(gpu: str | None, job: tuple[int, TrainCell, int]) -> dict:
        nonlocal done
        number, cell, seed = job
        name = f"{cell} seed {seed}"
        left = budget.share(deadline_s)
        curve = {"seed": seed, "losses": [], "device_mib": [], "host_mib": [], "seconds": 0.0}
        if left <= 0:
            curve |= {"outcome": "not run", "message": budget.used_up}
        else:
            ended = run_child(
                ENTRY,
                {"cell": cell.to_dict(), "seed": seed, "threads": threads},
                deadline_s=left,
                folder=place_of(folder, number, name),
                env=gpus.only(gpu),
                stop=stop,
            )
            outcome, message = budget.judged(ended.status, ended.message, left, deadline_s)
            found = ended.result or {}
            if "declined" in found:
                outcome, message, found = "declined", found["declined"], {}
            curve |= {"outcome": outcome, "message": message, "seconds": ended.seconds, **found}
        done += 1
        if progress:
            last = f", last loss {curve['losses'][-1]:.4f}" if curve["losses"] else ""
            said = f"{name}: {curve['outcome']}, {curve['seconds']:.1f} s{last}"
            print(f"[{done}/{len(asked)}] {said}", file=sys.stderr, flush=True)
        return curve

    curves = lent.map(one, asked, workers, stop=stop)
    return [
        _row(cell, [curve for (of, _, _), curve in zip(asked, curves, strict=True) if of == number])
        for number, cell in enumerate(cells)
    ]


def _row(cell: TrainCell, curves: Sequence[dict]) -> dict:
    """The cell's row from the curves of its seeds."""
    row = {**cell.to_dict(), "name": cell.name, "variant": VARIANT, "timing": "none"}
    row |= {"outcome": "ok", "message": ""}
    if broke := next((curve for curve in curves if curve["outcome"] != "ok"), None):
        row |= {"outcome": broke["outcome"], "message": f"seed {broke['seed']}: {broke['message']}"}
    row |= {name: curves[0][name] for name in ("device_mib", "host_mib")}
    row["seconds"] = sum(curve["seconds"] for curve in curves)
    row["losses"] = {str(curve["seed"]): curve["losses"] for curve in curves if curve["losses"]}
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
