"""Training throughput, one cell after another, each in processes of its own."""

import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nsa.experiments.throughput.cell import TrainCell
from nsa.lab.process.ranks import run_ranks
from nsa.lab.process.trial import place_of, run_child
from nsa.lab.sweep import Budget

ENTRY = "nsa.experiments.throughput.child:measure_rank"
EMPTY = {
    **dict.fromkeys(
        (
            "tokens_s", "recount_tokens_s", "step_ms", "step_ms_q20", "step_ms_q80",
            "communication_ms", "loader_wait_ms", "peak_mib", "parameters", "recompilations",
            "matmul_tflops", "nominal_tflops", "watched_ms", "unwatched_ms", "watched_times",
        ),
        math.nan,
    ),
    **{name: {} for name in ("phase_ms", "paths")},
    **{name: [] for name in ("losses", "device_mib", "host_mib", "by_rank")},
    **{"syncs": None, "device_name": "", "torch": "", "threads": None, "flops": None},
}  # fmt: skip
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

    A row has the cell's fields, `outcome` (of trial.STATUSES, "declined" by the backend, or "not
    run" for want of time), `message`, `evidence`, `seconds`, `timing` ("absolute" on a GPU, "ratio"
    on a CPU, whose times may only be compared with each other) and the measured values of
    `throughput_trial.measure_rank`, NaN or empty where the outcome is not "ok". Several ranks run
    under torchrun; the row then is the job's, and `by_rank` keeps each rank's own.

    deadline_s: for each cell. budget_s: for all; the last ones may not be run to their end.
    threads: torch's CPU threads in each rank. folder: keeps each trial's files. Raises ValueError
    for an illegal cell or deadline before any cell runs.
    """
    checked = [cell if isinstance(cell, TrainCell) else TrainCell.from_dict(cell) for cell in cells]
    if not deadline_s > 0:
        raise ValueError(f"deadline_s={deadline_s} must be greater than 0 seconds")
    budget, rows = Budget(budget_s), []
    for number, cell in enumerate(checked):
        left = budget.share(deadline_s)
        spec = {"cell": cell.to_dict(), "threads": threads, "deadline_s": left}
        if left <= 0:
            row = row_of(cell, "not run", budget.used_up)
        else:
            row = _trial(cell, entry, spec, left, place_of(folder, number, cell))
            ended = budget.judged(row["outcome"], row["message"], left, deadline_s)
            row["outcome"], row["message"] = ended
        rows.append(row)
        if progress:
            print(f"[{len(rows)}/{len(checked)}] {line_of(cell, row)}", file=sys.stderr, flush=True)
    return rows


def _trial(cell: TrainCell, entry: str, spec: dict, left: float, folder: Path | None) -> dict:
    if cell.parallel == "none":
        ended = run_child(entry, spec, deadline_s=left, folder=folder)
        results = [] if ended.result is None else [ended.result]
        return row_of(cell, ended.status, ended.message, ended.evidence, ended.seconds, results)
    with tempfile.TemporaryDirectory(prefix="nsa-ranks-") as temporary:
        place = folder or temporary
        found = run_ranks(entry, spec, ranks=cell.ranks, deadline_s=left, folder=place)
    seconds = found[0]["seconds"]
    bad = [rank for rank in found if rank["status"] != "ok"]
    if not bad:
        return row_of(cell, "ok", seconds=seconds, results=[rank["result"] for rank in found])
    first = next((rank for rank in bad if rank["first"]), bad[0])
    status = "error" if first["status"] == "ended" else first["status"]
    message = f"rank {first['rank']} of {cell.ranks}: {first['message']}"
    return row_of(cell, status, message, first["evidence"], seconds)


def row_of(
    cell: TrainCell,
    outcome: str,
    message: str = "",
    evidence: str = "",
    seconds: float = 0.0,
    results: Sequence[dict] = (),
) -> dict:
    """A cell, how it ended and what its ranks measured, as one flat row; see `measure`."""
    measured = dict(results[0]) if results else {}
    if "declined" in measured:
        outcome, message, measured = "declined", measured["declined"], {}
    elif len(results) > 1:
        measured["by_rank"] = [
            {name: rank[name] for name in (*WORST, "tokens_s", "phase_ms", "syncs")}
            for rank in results
        ]
        measured |= {name: max(rank[name] for rank in results) for name in WORST}
        for name in ("tokens_s", "recount_tokens_s"):
            measured[name] = min(rank[name] for rank in results)
        each = zip(*(rank["losses"] for rank in results), strict=True)
        measured["losses"] = [sum(losses) / len(losses) for losses in each]
        if measured["syncs"] is not None:
            measured["syncs"] = max(rank["syncs"] for rank in results)
    return {
        **cell.to_dict(),
        "name": cell.name,
        "outcome": outcome,
        "message": message,
        "evidence": evidence,
        "seconds": seconds,
        "timing": "absolute" if cell.device == "cuda" else "ratio",
        **EMPTY,
        **measured,
    }


def line_of(cell: TrainCell, row: dict) -> str:
    """One line for a person who waits."""
    if row["outcome"] != "ok":
        message = row["message"].splitlines()[0][:100] if row["message"] else ""
        return f"{cell}: {row['outcome']} after {row['seconds']:.1f} s ({message})"
    speed = f"{row['tokens_s']:,.0f} tokens/s, {row['step_ms']:.1f} ms a step"
    return f"{cell}: {speed}, {row['seconds']:.1f} s in all"
