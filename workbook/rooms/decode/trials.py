"""Measure each size in a separate child process, one implementation after another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whyhung.process import gpus
from whyhung.process.trial import Outcome
from workbook.lab import sweep
from workbook.lab.measure.limits import Ceilings
from workbook.rooms.decode.cells import Cell
from workbook.rooms.decode.child import DENSE, NSA, subjects
from workbook.runs import metrics

ENTRY = "workbook.rooms.decode.child:measure_cell"
UNKNOWN = Ceilings(math.nan, math.nan)
MODES = ("eager", "graph")


@dataclass(frozen=True)
class Result:
    """Result of a cell's child: a row per subject, see `child.measure_cell`."""

    cell: Cell
    rows: list[dict] = field(default_factory=list)
    ceilings: Ceilings = UNKNOWN

    def limit_ms(self, operation: str) -> float:
        """Lower bound in ms: bytes of one step's keys and values over a copy's bandwidth here."""
        read = self.cell.bytes_read("dense" if operation == DENSE else "nsa")
        return 1e3 * read / (self.ceilings.copy_tb_s * 1e12)


def measure(
    cells: Sequence[Cell],
    *,
    device: str = "cpu",
    deadline_s: float,
    budget_s: float = math.inf,
    workers: int = 1,
    threads: int | None = None,
    folder: str | Path | None = None,
    progress: bool = True,
    **chosen: Any,
) -> list[Result]:
    """Measure the cells, in order; deadlines, workers and GPUs are as in `sweep.measure`.

    chosen: backends, pages, dense and peers, as in `child.subjects`. A child that does not return
    leaves the rows that it has measured, and one for each other subject with its outcome, "oom",
    "error" or "not run", and the reason.
    """
    common = chosen | {"device": device, "threads": threads}
    ended = sweep.measure(
        ENTRY,
        cells,
        lambda cell, s: common | {"cell": cell.to_dict()},
        deadline_s=deadline_s,
        budget_s=budget_s,
        workers=1 if device == "cuda" else workers,
        gpus=gpus.all_visible() if device == "cuda" else None,
        env={"TRITON_INTERPRET": "1"} if device == "cpu" else None,
        folder=folder,
        said=_told,
        progress=progress,
    )
    every = subjects(**chosen, gpu=device == "cuda")
    return [result_of(cell, one, every) for cell, one in zip(cells, ended, strict=True)]


def result_of(cell: Cell, ended: Outcome, every: Sequence) -> Result:
    """Result of a cell from how its process ended."""
    found = ended.result if ended.status == "ok" else ended.so_far
    rows, ceilings = (found["rows"], Ceilings(**found["ceilings"])) if found else ([], UNKNOWN)
    if ended.status == "ok":
        return Result(cell, rows, ceilings)
    status = ended.status if ended.status in ("oom", "not run") else "error"
    lost = {"outcome": status, "message": f"the process: {ended.status}, {ended.message}", "ms": {}}
    same = ("name", "operation", "layout")
    rest = [
        {name: getattr(subject, name) for name in same} | lost for subject in every[len(rows) :]
    ]
    return Result(cell, rows + rest, ceilings)


def _told(result: dict) -> str:
    rows = result["rows"]
    bad = [f"{row['name']} {row['outcome']}" for row in rows if row["outcome"] != "ok"]
    return f"{len(rows) - len(bad)} ok" + "".join(f", {text}" for text in bad)


def to_metrics(results: Sequence[Result]) -> list[dict]:
    """Rows of metrics.csv: latency and limit in ms by mode, cache and read bytes, error."""
    found = []
    for result in results:
        cell = result.cell
        sizes = cell.to_dict()
        tokens, paper = sizes.pop("tokens"), sizes.pop("config")
        for row in result.rows:
            same = {"operation": row["operation"], "backend": row["name"], "x_name": "tokens"}
            config = sizes | paper | {name: row[name] for name in ("layout", "outcome", "message")}
            config |= {"keys": cell.keys, "copy_tb_s": result.ceilings.copy_tb_s}
            same |= {"x_value": tokens, "config": config}
            for mode in [m for m in MODES if m in row["ms"]] or ["eager"]:
                three = row["ms"].get(mode, [math.nan] * 3)
                found.append(same | metrics.values("latency", "ms", *three, mode=mode))
            values = [("limit", "ms", result.limit_ms(row["operation"]))]
            read = cell.bytes_read("nsa" if row["operation"] == NSA else "dense")
            values.append(("bytes_read", "B", read))
            for name in ("cache_bytes", "foretold_bytes", "workspace_bytes"):
                if name in row:
                    values.append((name, "B", row[name]))
            if "error" in row:
                values.append(("error", "of the largest exact value", row["error"][0]))
                values.append(("error_allowed", "of the largest exact value", row["error"][1]))
            found += [same | metrics.values(*one) for one in values]
    return found
