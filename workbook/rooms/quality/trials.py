"""The cells of the notebook: trained in child processes, or read from rows made before."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa.spelling import choice
from whyhung.process import gpus
from workbook.lab import sweep
from workbook.rooms.quality.cells import BASE, BYTES, DENSE, Cell, cells_of, text_of
from workbook.rooms.quality.planted import KINDS
from workbook.runs import measured, metrics, parameters
from workbook.runs.measured import FILE, write

ENTRY = "workbook.rooms.quality.child:train_cell"
MAX_TEXT = 8 << 20  # bytes of a CPU's training text, which reads less of it
__all__ = ["FILE", "cells", "check_parameters", "measure", "of_run", "read", "to_metrics", "write"]

Rows = Sequence[dict[str, Any]]
SAME = ("model", "bytes", "batch_tokens", "lr", "precision", "vocab")  # of cells that are compared


def cells(values: Mapping[str, Any]) -> list[Cell]:
    """The cells of the notebook's parameters. ValueError for any that cannot be trained."""
    common = {name: values[name] for name in ("model", "batch_tokens", "lr")}
    common["vocab"] = values.get("vocab", BYTES)  # which runs before 2026-11-29 do not have
    common |= {"bytes": values["train_bytes"], "precision": values["precision"]}
    return cells_of(values["variants"], values["seeds"], values["tokens"], **common)


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise ValueError for notebook parameters that cannot be run."""
    found = cells(values)
    for name in (BASE, DENSE):
        if name not in values["variants"]:
            raise ValueError(
                f"variants={values['variants']} lack {name!r}, with which variants are compared"
            )
    if len(set(found)) < len(found):
        raise ValueError("two cells are equal; each variant, seed and length is named once")
    choice("longest", values["longest"], (1, 2, 4))
    measured.check_files(values["rows"], "python -m workbook.rooms.quality")
    if values["rows"]:
        read(values["rows"], found[0])


def read(files: Sequence[str], cell: Cell) -> list[dict[str, Any]]:
    """Rows of the files that were trained as `cell` was: variant, seed and length may differ.
    ValueError, with how the others were trained, if there are none."""
    found, wanted = measured.read(files), {name: getattr(cell, name) for name in SAME}
    known = [vars(Cell.from_dict(row["cell"])) for row in found]
    others = [{name: one[name] for name in SAME} for one in known]
    mine = [row for row, other in zip(found, others, strict=True) if other == wanted]
    if not mine:
        told = "; or ".join(dict.fromkeys(_differences(other, wanted) for other in others))
        raise ValueError(f"rows={list(files)} hold no cell of these parameters, but with {told}")
    return mine


def of_run(folder: Path) -> list[dict[str, Any]]:
    """Rows of a stored run: its own file, or where that was not kept, those that it read."""
    values, own = parameters.read_file(folder / "parameters.yaml"), folder / FILE
    return read([str(own)] if own.is_file() else values["rows"], cells(values)[0])


def _differences(other: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Settings of another training that are not the wanted ones, by the notebook's names."""
    given = {name: value for name, value in other.items() if value != wanted[name]}
    return ", ".join(f"{'train_bytes' if n == 'bytes' else n}={v}" for n, v in given.items())


def measure(
    chosen: Sequence[Cell],
    *,
    device: str,
    deadline_s: float,
    budget_s: float = math.inf,
    workers: int = 1,
    threads: int | None = None,
    longest: int = 1,
    folder: str | Path | None = None,
    progress: bool = True,
    text: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Train each cell in a process of its own; return its row, whose outcome is "ok", "diverged",
    or with a message "oom", "error" or "not run". Times, workers and GPUs as in `sweep.measure`;
    text: a folder of shards; by default they are made of this Python's packages."""
    on_gpu = device == "cuda"
    most = None if on_gpu else MAX_TEXT
    with tempfile.TemporaryDirectory() as made:
        if text is None:
            text_of(chosen, Path(made), longest, most)
        common = {
            "text": str(text or made),
            "device": device,
            "threads": threads,
            "longest": longest,
        }
        ended = sweep.measure(
            ENTRY,
            chosen,
            lambda cell, seconds: common | {"cell": cell.to_dict()},
            deadline_s=deadline_s,
            budget_s=budget_s,
            workers=1 if on_gpu else workers,
            gpus=gpus.all_visible() if on_gpu else None,
            folder=folder,
            name=lambda cell: cell.name,
            said=lambda row: f"{row['outcome']}, {row.get('bits', math.nan):.3f} bits a byte",
            progress=progress,
        )
    return [_row(cell, one) for cell, one in zip(chosen, ended, strict=True)]


def _row(cell: Cell, ended: Any) -> dict[str, Any]:
    if ended.status == "ok":
        return ended.result
    status = ended.status if ended.status in ("oom", "not run") else "error"
    return {
        "cell": cell.to_dict(),
        "outcome": status,
        "message": f"{ended.status}: {ended.message}",
    }


def to_metrics(rows: Rows) -> list[dict[str, Any]]:
    """Rows of metrics.csv: bits a byte by position, accuracy of each task by length, bytes a
    second, and parameters; one row without a value for a cell that has none."""
    found = []
    for row in rows:
        cell = row["cell"]
        config = cell | {name: row.get(name) for name in ("outcome", "message", "parameters")}
        same = {"operation": "training", "backend": cell["variant"], "config": config}
        same |= {name: row[name] for name in ("device", "torch") if row.get(name)}
        same |= {"mode": f"seed {cell['seed']}", "x_name": "tokens", "x_value": cell["tokens"]}
        if row["outcome"] != "ok":
            found.append(same | metrics.values("bits", "bits a byte", math.nan))
            continue
        found.append(same | metrics.values("bits", "bits a byte", row["bits"]))
        if row.get("tokens_s"):
            speed = row["tokens_s"] * row.get("bytes_per_token", 1)
            found.append(same | metrics.values("speed", "bytes/s", speed))
        for kind in KINDS:
            for length, (accuracy, _) in row["tasks"][kind].items():
                at = {"x_value": float(length)}
                found.append(same | at | metrics.values(kind, "share of bytes", accuracy))
        for end, bits in row["by_position"][str(cell["tokens"])].items():
            at = {"x_name": "position", "x_value": float(end)}
            found.append(same | at | metrics.values("bits_at", "bits a byte", bits))
    return found
