"""Tables of shared sequences: times, efficiency, memory, and which method is faster where."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas

from nsa.blocks import compressed_span, count_compressed
from workbook.rooms.long_context.cells import Cell, estimate_mib

Rows = Sequence[dict[str, Any]]
INDEX = ["T", "ranks", "method"]


def length(tokens: int) -> str:
    """T as text: 131072 as 128k, 1048576 as 1M."""
    scale, unit = (2**20, "M") if tokens % 2**20 == 0 else (1024, "k")
    return f"{tokens // scale}{unit}" if tokens % scale == 0 else str(tokens)


def method_of(cell: Cell) -> str:
    """Name of the method in tables; one rank has none."""
    held = f", {cell.heads_at_once} at once" * (cell.heads_at_once is not None)
    return "one rank" if cell.ranks == 1 else f"{cell.method}{held}"


def frame(rows: Rows) -> pandas.DataFrame:
    """Table, a line a cell, by T, ranks and method.

    Columns: ms of forward, of backward and of `both`; efficiency, both on one rank over P times
    both on P, NaN without one rank; MB that a rank receives in each pass; sending and alone, ms of
    a step's collectives and of those during which nothing else ran, on a GPU; MiB beyond inputs and
    outputs of each pass, the same estimated from shapes, and the larger of the two differences.
    """
    lines = []
    for row in rows:
        cell, ms, mib = Cell.from_dict(row["cell"]), row.get("ms", {}), row.get("memory_mib", {})
        line = {"T": cell.shape.tokens, "ranks": cell.ranks, "method": method_of(cell)}
        line |= {name: ms.get(name, math.nan) for name in ("forward", "backward")}
        line["both"] = line["forward"] + line["backward"]
        line |= {f"{n} MB": sent / 1e6 for n, sent in cell.sent_bytes().items()}
        sending = row.get("sending", {})
        line["sending"] = sending.get("sent_ms", math.nan)
        line["alone"] = sending.get("alone_ms", math.nan)
        estimate = estimate_mib(row)
        for name in ("forward", "backward"):
            line[f"{name} MiB"] = mib.get(name, math.nan)
            line[f"{name} MiB, estimated"] = estimate.get(name, math.nan)
        line["off, %"] = max(
            (100 * (estimate[n] / mib[n] - 1) for n in estimate if mib.get(n)),
            key=abs,
            default=math.nan,
        )
        lines.append(line)
    columns = [*INDEX, "forward", "backward", "both"]
    found = pandas.DataFrame(lines, columns=None if lines else columns)
    one = found[found["ranks"] == 1].drop_duplicates("T").set_index("T")["both"]
    efficiency = found["T"].map(one) / (found["ranks"] * found["both"])
    found.insert(len(columns), "efficiency", efficiency)
    return found.sort_values(INDEX, kind="stable").set_index(INDEX)


def shown(found: pandas.DataFrame) -> pandas.DataFrame:
    """The frame for a reader: T written out, few digits, no column without a value."""
    digits = {"efficiency": 3, "off, %": 2} | dict.fromkeys(("forward", "backward", "both"), 2)
    digits |= {name: 2 for name in found if name.endswith(" MB") or name in ("sending", "alone")}
    digits |= {name: 1 for name in found if "MiB" in name}
    named = found.rename(index=length, level="T").round(digits)
    return named.dropna(axis=1, how="all").astype(object).where(named.notna(), "")


def faster(rows: Rows) -> pandas.DataFrame:
    """Table of the methods' times of both passes in ms, a line for each T and number of ranks that
    has two: the faster one, and by how many % the next needs more."""
    both = frame(rows)["both"].dropna()
    lines = []
    for (tokens, ranks), of in both.groupby(level=["T", "ranks"]):
        ordered = of.droplevel([0, 1]).sort_values()
        if len(ordered) > 1:
            more = 100 * (ordered.iloc[1] / ordered.iloc[0] - 1)
            line = {"T": length(tokens), "ranks": ranks} | of.droplevel(["T", "ranks"]).round(
                2
            ).to_dict()
            lines.append(line | {"faster": ordered.index[0], "the next, %": f"+{more:.0f}"})
    found = pandas.DataFrame(lines, columns=None if lines else ["T", "ranks", "faster"])
    return found.set_index(["T", "ranks"]).fillna("")


def notes(rows: Rows) -> pandas.DataFrame:
    """Table of cells without a number, and why."""
    lines = [
        {"cell": str(Cell.from_dict(row["cell"])), "outcome": row["outcome"],
         "message": row.get("message", "")}
        for row in rows if row["outcome"] != "ok"
    ]  # fmt: skip
    return pandas.DataFrame(lines, columns=["cell", "outcome", "message"]).set_index("cell")


def busiest(cell: Cell, neighbours: bool = False) -> float:
    """Pairs of a query and a compressed key on the rank that has most, over the mean of ranks; for
    head and tail chunks, or for `neighbours`, as many tokens in a row."""
    seen = np.maximum(0, compressed_span(cell.shape.config).ended(np.arange(cell.shape.tokens)))
    parts = seen.reshape(2 * cell.ranks, -1).sum(1)
    ranks = parts.reshape(-1, 2).sum(1) if neighbours else (parts + parts[::-1])[: cell.ranks]
    return float(ranks.max() / ranks.mean())


def facts(cells: Sequence[Cell]) -> list[str]:
    """Machine-independent lines: bytes that a rank receives, and how evenly pairs are divided."""
    found = []
    for cell in cells:
        if cell.ranks == 1:
            keys = count_compressed(cell.shape.tokens, cell.shape.config)
            found.append(f"T={cell.shape.tokens}: {keys} compressed keys")
            continue
        sent = cell.sent_bytes()
        line = f"{cell}: receives {sent['forward']:,} B forward, {sent['backward']:,} B backward"
        even, uneven = busiest(cell), busiest(cell, neighbours=True)
        share = f"{even:.3f} of the mean in head and tail chunks, {uneven:.3f} in a row"
        found.append(f"{line}; the busiest rank has {share}" * (cell.method == "gather") or line)
    return found
