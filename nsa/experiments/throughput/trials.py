"""Training throughput, one cell after another, each in processes of its own."""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nsa.experiments.throughput.cell import Measured, TrainCell
from nsa.lab import sweep
from nsa.lab.process.ranks import run_ranks
from nsa.lab.process.trial import Outcome, run_child

ENTRY = "nsa.experiments.throughput.child:measure_rank"
# A job is as slow, and as large, as its slowest and largest rank.
WORST = ("step_ms", "step_ms_q20", "step_ms_q80", "peak_mib", "loader_wait_ms", "recompilations")


def measure(
    cells: Sequence[TrainCell | dict],
    *,
    deadline_s: float,
    budget_s: float = math.inf,
    threads: int | None = None,
    folder: str | Path | None = None,
    progress: bool = True,
    entry: str = ENTRY,
) -> list[dict]:
    """One row a cell, in the cells' order; never two cells at once, which would falsify times.

    A row has the cell's fields, `outcome` (as of `sweep.measure`, which the other options are for,
    too), `message`, `evidence`, `seconds`, `timing` ("absolute" on a GPU, "ratio" on a CPU, whose
    times may only be compared with each other) and what was `Measured`. Several ranks run under
    torchrun; the row then is the job's, and `by_rank` keeps each rank's own.

    threads: torch's CPU threads in each rank. Raises ValueError for an illegal cell or deadline
    before any cell runs.
    """
    checked = [cell if isinstance(cell, TrainCell) else TrainCell.from_dict(cell) for cell in cells]
    ended = sweep.measure(
        entry,
        checked,
        lambda cell, s: {"cell": cell.to_dict(), "threads": threads, "deadline_s": s},
        deadline_s=deadline_s,
        budget_s=budget_s,
        folder=folder,
        said=lambda r: f"{r['tokens_s']:,.0f} tokens/s, {r['step_ms']:.1f} ms a step",
        progress=progress,
        run=_run,
    )
    return [row_of(cell, how) for cell, how in zip(checked, ended, strict=True)]


def _run(entry: str, spec: dict, *, folder: Path | None, **options: Any) -> Outcome:
    """One cell, of one process or of several ranks."""
    if spec["cell"]["parallel"] == "none":
        return run_child(entry, spec, folder=folder, **options)
    ranks = spec["cell"]["ranks"]
    with tempfile.TemporaryDirectory(prefix="nsa-ranks-") as temporary:
        found = run_ranks(entry, spec, ranks=ranks, folder=folder or temporary, **options)
    seconds = found[0]["seconds"]
    bad = [rank for rank in found if rank["status"] != "ok"]
    if not bad:
        return Outcome("ok", _job([rank["result"] for rank in found]), seconds, "", 0)
    first = next((rank for rank in bad if rank["first"]), bad[0])
    status = "error" if first["status"] == "ended" else first["status"]
    message = f"rank {first['rank']} of {ranks}: {first['message']}"
    return Outcome(status, None, seconds, message, None, first["evidence"])


def _job(ranks: Sequence[dict]) -> dict:
    """What a job measured, from what its ranks did."""
    if len(ranks) == 1 or "declined" in ranks[0]:
        return ranks[0]
    kept = (*WORST, "tokens_s", "phase_ms", "syncs")
    job = ranks[0] | {"by_rank": [{name: rank[name] for name in kept} for rank in ranks]}
    job |= {name: max(rank[name] for rank in ranks) for name in WORST}
    job |= {name: min(rank[name] for rank in ranks) for name in ("tokens_s", "recount_tokens_s")}
    each = zip(*(rank["losses"] for rank in ranks), strict=True)
    job["losses"] = [sum(losses) / len(losses) for losses in each]
    if job["syncs"] is not None:
        job["syncs"] = max(rank["syncs"] for rank in ranks)
    return job


def row_of(cell: TrainCell, ended: Outcome) -> dict:
    """A cell, how it ended and what it measured, as one flat row; see `measure`."""
    return {
        **cell.to_dict(),
        "name": cell.name,
        "outcome": ended.status,
        "message": ended.message,
        "evidence": ended.evidence,
        "seconds": ended.seconds,
        "timing": "absolute" if cell.device == "cuda" else "ratio",
        **asdict(Measured(**(ended.result or {}))),
    }
