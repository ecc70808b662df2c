"""A benchmark's cells as lines of text and as rows of the workbook's one long table."""

import json
import math
from collections.abc import Iterator, Sequence

from nsa.experiments.comparison.cell import NOT_COMPARED
from nsa.experiments.comparison.implementations import LIMITS
from nsa.lab.measure.shapes import Shape

MODES = ("forward", "backward", "step", "graph_forward", "graph_backward")
HEADS = ("implementation", "fwd ms", "bwd ms", "step ms", "graph fwd/bwd", "of limit")
HEADS += ("MiB fwd/bwd", "error/allowed", "outcome")


def text(cells: Sequence[dict]) -> str:
    """One block a shape, one line an implementation; what was checked stands below the block."""
    blocks, shapes = [], list(dict.fromkeys(_shape_key(cell) for cell in cells))
    for shape in shapes:
        mine = [cell for cell in cells if _shape_key(cell) == shape]
        lines = [*map(_limit_line, limits_as_cells(mine)), *map(_line, mine)]
        blocks.append("\n".join([_title(mine[0]), *_aligned([HEADS, *lines]), *_notes(mine)]))
    return "\n\n".join(blocks)


def ended(cells: Sequence[dict], outcome: str) -> list[str]:
    """Implementations that ended so, with the reason: "red" where the accuracy check failed."""
    chosen = [cell for cell in cells if cell["outcome"] == outcome]
    return [f"{c['name']} at {Shape.from_dict(c['shape'])}: {c['message']}" for c in chosen]


def rows(cells: Sequence[dict]) -> list[dict]:
    """Rows in the schema of metrics.csv, `config` a dict: latency, fraction_of_limit, peak_memory,
    error, and the mean union of a shape's selection. What failed has rows without a median.

    The limit's own rows have the backend "limit" and "dense limit".
    """
    found = [row for cell in limits_as_cells(cells) for row in _latency_rows(cell)]
    found += [row for cell in limits_as_cells(cells) for row in _union_rows(cell)]
    for cell in cells:
        found += _latency_rows(cell)
        found += _other_rows(cell)
    return found


def limits_as_cells(cells: Sequence[dict]) -> Iterator[dict]:
    """The limit of each shape and operation as a cell of its own, for tables and plots."""
    seen = set()
    for cell in cells:
        key = (repr(cell["shape"]), cell["operation"])
        if key not in seen:
            seen.add(key)
            latency = {mode: [ms, ms, ms] for mode, ms in cell["limit_ms"].items()}
            bare = {"message": "", "checked": "", "errors": {}, "memory_mib": {}, "paths": {}}
            bare |= {"outcome": "ok", "latency_ms": latency}
            yield cell | bare | {"name": LIMITS[cell["operation"]]}


def _latency_rows(cell: dict) -> Iterator[dict]:
    modes = [m for m in MODES if m in cell["latency_ms"]]
    if "backward" not in modes:
        modes += [m for m in ("forward", "backward") if m not in modes]
    for mode in modes:
        median, q20, q80 = cell["latency_ms"].get(mode, [math.nan] * 3)
        yield _row(cell, mode, "latency", "ms", (median, q20, q80))
        limit = cell["limit_ms"].get(mode.removeprefix("graph_"))
        if limit is not None and median == median and _has_limit(cell):
            fraction = [limit / x for x in (median, q80, q20)]
            yield _row(cell, mode, "fraction_of_limit", "1", fraction)


def _has_limit(cell: dict) -> bool:
    """The limit is that of our NSA and of dense attention, not of another function."""
    return cell["name"] not in LIMITS.values() and cell["checked"] != NOT_COMPARED


def _other_rows(cell: dict) -> Iterator[dict]:
    for mode in ("forward", "backward"):
        mib = cell["memory_mib"].get(mode, math.nan)
        yield _row(cell, mode, "peak_memory", "MiB", (mib, mib, mib))
        if mode in cell["errors"]:
            worst, limit = cell["errors"][mode]
            row = _row(cell, mode, "error", "of the largest exact value", (worst, worst, worst))
            row["config"]["allowed"] = limit
            yield row


def _union_rows(cell: dict) -> Iterator[dict]:
    if cell["operation"] == "nsa_attention":
        for neighbours, blocks in cell["union"].items():
            name = f"mean_union_of_{neighbours}"
            yield _row(cell, "", name, "blocks", (blocks, blocks, blocks))


def _row(cell: dict, mode: str, metric: str, unit: str, values: Sequence[float]) -> dict:
    shape = dict(cell["shape"])
    tokens, sizes = shape.pop("tokens"), shape.pop("config")
    config = shape | sizes | {n: cell[n] for n in ("outcome", "message", "checked", "timing")}
    config |= cell["ceilings"] | {f"union_{n}": b for n, b in cell["union"].items()}
    row = {"operation": cell["operation"], "backend": cell["name"], "mode": mode, "metric": metric}
    row |= {"unit": unit, "x_name": "tokens", "x_value": tokens, "config": config}
    return row | dict(zip(("median", "q20", "q80"), values, strict=True))


def _shape_key(cell: dict) -> str:
    return json.dumps(cell["shape"], sort_keys=True)


def _title(cell: dict) -> str:
    shape, sizes = Shape.from_dict(cell["shape"]), cell["shape"]["config"]
    paper = [f"{n}={v}" for n, v in sizes.items() if v != getattr(type(shape.config)(), n)]
    union = ", ".join(f"{b:.1f} of {n}" for n, b in cell["union"].items())
    extra = [f"distinct blocks of neighbours: {union}"] * bool(union) + paper
    extra += ["times not meaningful (no GPU)"] * (cell["timing"] != "absolute")
    peak = cell["ceilings"]
    extra.append(f"{peak['matmul_tflops']:.3g} TFLOP/s, {peak['copy_tb_s']:.3g} TB/s")
    return f"{shape} · {' · '.join(extra)}"


def _line(cell: dict) -> tuple[str, ...]:
    ms, memory, errors = cell["latency_ms"], cell["memory_mib"], cell["errors"]
    limit = cell["limit_ms"]
    timed = [m for m in ("forward", "backward") if m in ms and _has_limit(cell)]
    fractions = [f"{limit[m] / ms[m][0]:.0%}" for m in timed]
    graph = [f"{ms[m][0]:.3g}" for m in ("graph_forward", "graph_backward") if m in ms]
    mib = [f"{memory[m]:,.0f}" for m in ("forward", "backward") if m in memory]
    told = [f"{errors[m][0]:.1e}/{errors[m][1]:.1e}" for m in errors]
    return (
        cell["name"],
        *(_time(ms.get(mode)) for mode in ("forward", "backward", "step")),
        " / ".join(graph),
        " / ".join(fractions),
        " / ".join(mib),
        " ".join(told),
        cell["outcome"],
    )


def _limit_line(cell: dict) -> tuple[str, ...]:
    ms = cell["limit_ms"]
    times = (f"{ms[mode]:.3g}" for mode in ("forward", "backward", "step"))
    return (cell["name"], *times, "", "", "", "", "")


def _time(values: Sequence[float] | None) -> str:
    if values is None:
        return ""
    median, q20, q80 = values
    return f"{median:.4g} [{q20:.4g}, {q80:.4g}]"


def _notes(cells: Sequence[dict]) -> list[str]:
    lines = [f"  {c['name']} ({c['outcome']}): {c['message']}" for c in cells if c["message"]]
    checked: dict[str, list[str]] = {}
    for cell in cells:
        if cell["checked"]:
            checked.setdefault(cell["checked"], []).append(cell["name"])
    return lines + [f"  checked, {what}: {', '.join(who)}" for what, who in checked.items()]


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns; the first and the last are aligned at the left, the others at the right."""
    columns = []
    for index, column in enumerate(zip(*table, strict=True)):
        pad = str.ljust if index in (0, len(HEADS) - 1) else str.rjust
        columns.append([pad(cell, max(map(len, column))) for cell in column])
    return ["  " + "  ".join(line).rstrip() for line in zip(*columns, strict=True)]
