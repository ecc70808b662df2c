"""Cells of a benchmark as text, as rows of metrics.csv, and as the table that `auto` uses."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from nsa.attention import measured, registry
from nsa.config import NSAConfig
from workbook.lab.measure.shapes import DTYPES, Shape
from workbook.rooms.comparison.cell import NOT_COMPARED
from workbook.rooms.comparison.implementations import LIMITS, NSA
from workbook.runs import metrics
from workbook.runs.files import read_json, write_atomically

MODES = ("forward", "backward", "step", "graph_forward", "graph_backward")
HEADS = ("implementation", "fwd ms", "bwd ms", "step ms", "graph fwd/bwd", "of limit")
HEADS += ("MiB fwd/bwd", "error/allowed", "outcome")


def text(cells: Sequence[dict]) -> str:
    """Format one block per shape, one line per implementation; checks are listed below it."""
    by_shape: dict[str, list[dict]] = {}
    for cell in cells:
        by_shape.setdefault(json.dumps(cell["shape"], sort_keys=True), []).append(cell)
    blocks = []
    for mine in by_shape.values():
        lines = [
            (limit["name"], *(f"{limit['limit_ms'][mode]:.3g}" for mode in MODES[:3]), *[""] * 5)
            for limit in _limits(mine)
        ]
        lines += map(_line, mine)
        blocks.append("\n".join([_title(mine[0]), *_aligned([HEADS, *lines]), *_notes(mine)]))
    return "\n\n".join(blocks)


def ended(cells: Sequence[dict], outcome: str) -> list[str]:
    """Implementations with this outcome and the reason; "red": the accuracy check failed."""
    chosen = [cell for cell in cells if cell["outcome"] == outcome]
    return [f"{c['name']} at {Shape.from_dict(c['shape'])}: {c['message']}" for c in chosen]


def rows(cells: Sequence[dict]) -> list[dict]:
    """Rows in the schema of metrics.csv, `config` a dict: latency, fraction_of_limit, peak_memory,
    error, and the mean union of a shape's selection. Failures have rows without a median.

    Rows of the limits have the backends "limit" and "dense limit".
    """
    found = [row for cell in _limits(cells) for row in _latency_rows(cell)]
    for cell in _limits(cells):
        if cell["operation"] == NSA:
            for neighbours, blocks in cell["union"].items():
                found.append(_row(cell, "", f"mean_union_of_{neighbours}", "blocks", blocks))
    for cell in cells:
        found += _latency_rows(cell)
        for mode in ("forward", "backward"):
            mib = cell["memory_mib"].get(mode, math.nan)
            found.append(_row(cell, mode, "peak_memory", "MiB", mib))
            if mode in cell["errors"]:
                worst, limit = cell["errors"][mode]
                row = _row(cell, mode, "error", "of the largest exact value", worst)
                row["config"]["allowed"] = limit
                found.append(row)
    return found


def _limits(cells: Sequence[dict]) -> Iterator[dict]:
    """Yield the limit of each shape and operation as a separate cell."""
    seen = set()
    for cell in cells:
        key = (repr(cell["shape"]), cell["operation"])
        if key not in seen:
            seen.add(key)
            latency = {mode: [ms, ms, ms] for mode, ms in cell["limit_ms"].items()}
            bare = {"message": "", "checked": "", "outcome": "ok", "latency_ms": latency}
            yield cell | bare | {"name": LIMITS[cell["operation"]]}


def _latency_rows(cell: dict) -> Iterator[dict]:
    modes = [m for m in MODES if m in cell["latency_ms"]]
    if "backward" not in modes:
        modes += [m for m in ("forward", "backward") if m not in modes]
    for mode in modes:
        median, q20, q80 = cell["latency_ms"].get(mode, [math.nan] * 3)
        yield _row(cell, mode, "latency", "ms", median, q20, q80)
        limit = cell["limit_ms"].get(mode.removeprefix("graph_"))
        if limit is not None and median == median and _has_limit(cell):
            fraction = [limit / x for x in (median, q80, q20)]
            yield _row(cell, mode, "fraction_of_limit", "1", *fraction)


def _has_limit(cell: dict) -> bool:
    """Return True if the limit applies: to our NSA and dense attention, not to other functions."""
    return cell["name"] not in LIMITS.values() and cell["checked"] != NOT_COMPARED


def _row(cell: dict, mode: str, *measured: Any) -> dict:
    """Row of metrics.csv. measured: arguments of `metrics.values`."""
    shape = dict(cell["shape"])
    tokens, sizes = shape.pop("tokens"), shape.pop("config")
    config = shape | sizes | {n: cell[n] for n in ("outcome", "message", "checked", "timing")}
    config |= cell["ceilings"] | {f"union_{n}": b for n, b in cell["union"].items()}
    row = {"operation": cell["operation"], "backend": cell["name"], "mode": mode}
    row |= {"x_name": "tokens", "x_value": tokens, "config": config}
    return row | metrics.values(*measured)


def _title(cell: dict) -> str:
    shape, sizes = Shape.from_dict(cell["shape"]), cell["shape"]["config"]
    paper = [f"{n}={v}" for n, v in sizes.items() if v != getattr(NSAConfig(), n)]
    union = ", ".join(f"{b:.1f} of {n}" for n, b in cell["union"].items())
    extra = [f"distinct blocks of neighbours: {union}"] * bool(union) + paper
    extra += ["times not meaningful (no GPU)"] * (cell["timing"] != "absolute")
    peak = cell["ceilings"]
    extra.append(f"{peak['matmul_tflops']:.3g} TFLOP/s, {peak['copy_tb_s']:.3g} TB/s")
    return f"{shape} · {' · '.join(extra)}"


def _line(cell: dict) -> tuple[str, ...]:
    ms, memory, limit = cell["latency_ms"], cell["memory_mib"], cell["limit_ms"]
    both = ("forward", "backward")
    timed = [m for m in both if m in ms and _has_limit(cell)]
    spread = {mode: "{:.4g} [{:.4g}, {:.4g}]".format(*values) for mode, values in ms.items()}
    return (
        cell["name"],
        *(spread.get(mode, "") for mode in MODES[:3]),
        " / ".join(f"{ms[m][0]:.3g}" for m in MODES[3:] if m in ms),
        " / ".join(f"{limit[m] / ms[m][0]:.0%}" for m in timed),
        " / ".join(f"{memory[m]:,.0f}" for m in both if m in memory),
        " ".join(f"{worst:.1e}/{allowed:.1e}" for worst, allowed in cell["errors"].values()),
        cell["outcome"],
    )


def _notes(cells: Sequence[dict]) -> list[str]:
    lines = [f"  {c['name']} ({c['outcome']}): {c['message']}" for c in cells if c["message"]]
    checked: dict[str, list[str]] = {}
    for cell in cells:
        if cell["checked"]:
            checked.setdefault(cell["checked"], []).append(cell["name"])
    return lines + [f"  checked, {what}: {', '.join(who)}" for what, who in checked.items()]


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Format lines of columns, the first and last left-aligned, the others right-aligned."""
    columns = []
    for index, column in enumerate(zip(*table, strict=True)):
        pad = str.ljust if index in (0, len(HEADS) - 1) else str.rjust
        columns.append([pad(cell, max(map(len, column))) for cell in column])
    return ["  " + "  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def write_measured(folders: Iterable[str | Path], path: str | Path = measured.TABLE) -> dict:
    """Rewrite nsa/attention/measured.json from the runs in `folders` alone, and return it.

    Uses rows of operation "nsa_attention", metric "latency" in ms, mode forward or backward, of a
    backend in the registry, from a run on a GPU, as produced by `rows`. A backend's value is the
    mean of its medians over the kinds of inputs (queries, shared_kv) measured for any backend at
    the shape; a backend that lacks one is left out. Raises ValueError for a run without any such
    row.
    """
    table: dict = {"runs": {}, "rows": []}
    for folder in map(Path, folders):
        gpus = read_json(folder / "environment.json", {}).get("gpus")
        frame = metrics.read(folder / "metrics.csv")
        found = list(_measured_rows(frame)) if gpus else []
        if not found:
            raise ValueError(f"{folder.name} has no latencies of backends measured on a GPU")
        names = ("device", "torch", "triton", "commit", "date")
        facts = {name: str(frame[name].iloc[0]) for name in names}
        facts["gpu"] = facts.pop("device")
        facts["compute_capability"] = gpus[0]["compute_capability"]
        table["runs"][folder.name] = facts
        table["rows"] += [{"run": folder.name, **row} for row in found]
    # one line per run and per shape, so that diffs of the table are readable
    runs = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table["runs"].items())
    lines = ",\n".join(f"  {json.dumps(row)}" for row in table["rows"])
    write_atomically(path, f'{{"runs": {{\n{runs}\n}}, "rows": [\n{lines}\n]}}\n')
    measured.rows.cache_clear()
    measured.nearest.cache_clear()
    return table


def _measured_rows(frame) -> Iterator[dict]:
    """Rows of the table, in the order in which a run measured its shapes."""
    wanted = {"operation": [NSA], "metric": ["latency"], "unit": ["ms"], "x_name": ["tokens"]}
    wanted |= {"backend": registry.names(), "mode": measured.DIRECTIONS}
    for column, values in wanted.items():
        frame = frame[frame[column].isin(values)]
    frame = frame[frame["median"].notna()]
    shapes, kinds = [], []
    for tokens, config in zip(frame["x_value"], metrics.configs(frame), strict=True):
        config["tokens"] = tokens
        sizes = {f.name: config[f.name] for f in fields(NSAConfig) if f.name in config}
        shape: dict = {name: int(config[name]) for name in measured.SIZES}
        shape["dtype"] = str(DTYPES[config["dtype"]]).removeprefix("torch.")
        shapes.append(json.dumps(shape | {"config": asdict(NSAConfig(**sizes))}, sort_keys=True))
        kinds.append(f"{config['queries']} {config['shared_kv']}")
    for shape, found in frame.assign(shape=shapes, kind=kinds).groupby("shape", sort=False):
        latency = {}
        for mode in measured.DIRECTIONS:
            mine = found[found["mode"] == mode]
            ms = mine.pivot_table("median", "backend", "kind", aggfunc="last", sort=False).dropna()
            if len(ms):
                latency[mode] = ms.mean(axis=1).round(4).to_dict()
        yield json.loads(shape) | {"latency_ms": latency}
