"""The cells of the notebook: measured in one launch of all ranks, or read from rows made before."""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa.config import NSAConfig
from nsa.parallel.mesh import METHODS
from nsa.spelling import choice
from workbook.lab.measure.shapes import TINY_CONFIG, Shape
from workbook.rooms.long_context.cells import Cell, cells_of, estimate_mib, launch
from workbook.runs import measured, metrics
from workbook.runs.measured import FILE, read, write

__all__ = ["cells", "check_parameters", "measure", "read", "to_metrics", "write"]

CONFIGS = {"tiny": TINY_CONFIG, "default": NSAConfig()}
UNNAMED = "GPU (not named)"  # device of rows measured before they named it

Rows = Sequence[dict[str, Any]]


def cells(values: Mapping[str, Any]) -> list[Cell]:
    """The cells of the notebook's parameters. ValueError for any that cannot be measured."""
    sizes = {name: values[name] for name in ("heads", "kv_heads", "dim", "dtype")}
    sizes |= {"value_dim": values["dim"], "config": CONFIGS[values["config"]]}
    shapes = [Shape(tokens, **sizes) for tokens in values["tokens"]]
    return cells_of(shapes, values["ranks"], values["methods"])


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise ValueError for notebook parameters that cannot be run."""
    choice("config", values["config"], CONFIGS)
    for method in values["methods"]:
        choice("method", method, METHODS)
    found = cells(values)
    if not any(cell.ranks > 1 for cell in found):
        given = {name: values[name] for name in ("tokens", "ranks", "methods")}
        raise ValueError(f"no cell has several ranks: {given}; ranks=[1, 2] would do")
    if len(set(found)) < len(found):
        raise ValueError("two cells are equal; each length and method is named once")
    measured.check_files(values["rows"], "python -m workbook.rooms.long_context")


def measure(
    chosen: Sequence[Cell],
    *,
    device: str,
    deadline_s: float,
    equal_up_to: int,
    backend: str = "auto",
    folder: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Measure the cells one after the other in one launch; return a row each, see `child.measure`.

    Rows are those that rank 0 has written, also if the launch ends early. The first cell without
    one then has the launch's own end as its outcome ("timeout", "crash" ..), the others "not run".
    """
    with tempfile.TemporaryDirectory() as made:
        place = Path(folder or made)
        file = place / FILE
        options = {"device": device, "backend": backend, "equal_up_to": equal_up_to}
        options |= {"deadline_s": deadline_s, "folder": place / "ranks"}
        ended = launch(chosen, file, **options)
        found = {json.dumps(r["cell"]): r for r in (read([str(file)]) if file.is_file() else ())}
    failed = sorted((one for one in ended if one["status"] != "ok"), key=lambda x: not x["first"])
    rows = []
    for cell in chosen:
        row = found.get(json.dumps(cell.to_dict()))
        if row is None:
            status, message = "not run", "the launch ended before"
            if failed:
                first, failed = failed[0], []
                status, message = first["status"], f"rank {first['rank']}: {first['message']}"
            row = {"cell": cell.to_dict(), "outcome": status, "message": message}
        rows.append(row)
    return rows


def device_of(row: Mapping[str, Any]) -> str:
    """Name of a row's device, "cpu" or a GPU's; "" for a row that does not say."""
    return row.get("device") or (UNNAMED if "sending" in row else "")


def on_gpu(rows: Rows) -> bool:
    """True if any row was measured on a GPU."""
    return any(device_of(row) not in ("", "cpu") for row in rows)


def note(rows: Rows) -> str:
    """Devices of the rows, for a figure."""
    return ", ".join(dict.fromkeys(filter(None, map(device_of, rows))))


def to_metrics(rows: Rows) -> list[dict[str, Any]]:
    """Rows of metrics.csv: ms and MiB of each pass, estimated MiB on a GPU, bytes that a rank
    receives, and differences; one row without a value for a cell that has none."""
    found = []
    for row in rows:
        cell = Cell.from_dict(row["cell"])
        config = row["cell"]["shape"] | {name: row.get(name) for name in ("outcome", "message")}
        config |= {"ranks": cell.ranks, "heads_at_once": cell.heads_at_once}
        same = {"operation": "shared_sequence", "config": config, "x_name": "tokens"}
        same |= {"backend": "one rank" if cell.ranks == 1 else cell.method}
        same |= {name: row[name] for name in ("torch", "triton") if row.get(name)}
        same |= {"x_value": cell.shape.tokens, "device": device_of(row) or None}
        values = [("latency", "ms", mode, ms) for mode, ms in row.get("ms", {}).items()]
        values += [("extra_memory", "MiB", *x) for x in row.get("memory_mib", {}).items()]
        values += [("estimated_memory", "MiB", *x) for x in estimate_mib(row).items()]
        values += [("received", "B", *x) for x in cell.sent_bytes().items()]
        values += [
            ("difference", "share of queries" if name == "rows" else "of the largest", name, x)
            for name, x in row.get("difference", {}).items()
        ]
        if row["outcome"] != "ok":
            values = [("latency", "ms", "", math.nan)]
        for metric, unit, mode, x in values:
            found.append(same | metrics.values(metric, unit, x, mode=mode))
    return found
