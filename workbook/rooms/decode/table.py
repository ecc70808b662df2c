"""Tables that summarize the decoding measurements. Draws nothing."""

import math
from collections.abc import Sequence

import pandas

from workbook.rooms.decode.cells import BRANCHES, PAPER, PLAIN, Cell
from workbook.rooms.decode.child import DENSE, NSA
from workbook.rooms.decode.equality import Counted, Equal
from workbook.rooms.decode.trials import MODES, Result
from workbook.runs.looks import length
from workbook.runs.scaling import crossing

MIB = 2**20
LIMIT = {NSA: "limit", DENSE: "dense limit"}


def frame(results: Sequence[Result]) -> pandas.DataFrame:
    """Table, a row per size and subject: name, operation, layout, outcome, message; ms by mode and
    `ms`, of the graph if any, else eager; limit_ms; cache, estimated and read bytes; error / limit.
    """
    found = []
    for result in results:
        cell = result.cell
        for row in result.rows:
            line = {"size": str(cell), "batch": cell.batch, "tokens": cell.tokens}
            line |= {key: row[key] for key in ("name", "operation", "layout", "outcome", "message")}
            line |= {f"{mode}_ms": row["ms"].get(mode, [math.nan])[0] for mode in MODES}
            line["ms"] = row["ms"].get("graph", row["ms"].get("eager", [math.nan]))[0]
            line["limit_ms"] = result.limit_ms(row["operation"])
            line["read"] = cell.bytes_read("dense" if row["operation"] == DENSE else "nsa")
            for name in ("cache_bytes", "foretold_bytes", "workspace_bytes"):
                line[name] = row.get(name, math.nan)
            worst, allowed = row.get("error", (math.nan, 1.0))
            line["error"] = worst / allowed
            found.append(line)
    return pandas.DataFrame(found)


def times(df: pandas.DataFrame, on_gpu: bool) -> pandas.DataFrame:
    """Table of ms per step on a GPU, by mode; on a CPU, of the time relative to dense attention at
    the same size. A failure shows its outcome."""
    if on_gpu:
        shown = df["graph_ms"].map("{:.3g}".format) + df["eager_ms"].map(" ({:.3g})".format)
        heading = "ms a step in a CUDA graph (eager)"
    else:
        shown = (df["ms"] / df["size"].map(fastest(df, DENSE))).map("{:.2f}".format)
        heading = "time over dense attention's (no GPU: only ratios)"
    shown = shown.where(df["outcome"] == "ok", df["outcome"])
    table = df.assign(text=shown).pivot(index="name", columns="size", values="text")
    ordered = table.loc[list(dict.fromkeys(df["name"])), list(dict.fromkeys(df["size"]))]
    if on_gpu:
        for operation, name in LIMIT.items():
            limits = df[df["operation"] == operation].drop_duplicates("size").set_index("size")
            if len(limits):
                ordered.loc[name] = limits["limit_ms"].map("{:.3g}".format)
    return ordered.rename_axis(index=None, columns=heading)


def fastest(df: pandas.DataFrame, operation: str) -> pandas.Series:
    """Time in ms by size of the operation's fastest subject, ours or torch's."""
    rows = df[(df["operation"] == operation) & (df["layout"] == PLAIN) & df["ms"].notna()]
    rows = rows[~rows["name"].str.startswith("peer ")]
    return rows.groupby("size", sort=False)["ms"].min()


def notes(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table of subjects that did not run or finish, and why."""
    rows = df[df["message"] != ""]
    return rows[["name", "size", "outcome", "message"]].set_index("name")


def ratios(df: pandas.DataFrame, results: Sequence[Result]) -> pandas.DataFrame:
    """Table by size: keys that a step reads, dense / NSA in keys and time, the paper's ratio."""
    ours, dense = fastest(df, NSA), fastest(df, DENSE)
    found = []
    for result in results:
        cell, size = result.cell, str(result.cell)
        line = {"size": size, **{branch: cell.keys[branch] for branch in BRANCHES}}
        line |= {"NSA": cell.nsa_keys, "dense": cell.tokens}
        line["dense / NSA, keys"] = round(cell.tokens / cell.nsa_keys, 2)
        paper = PAPER.get(cell.tokens)
        line["the paper's"] = f"{cell.tokens / paper:.1f}" if paper else ""
        line["dense / NSA, time"] = round(dense.get(size, math.nan) / ours.get(size, math.nan), 2)
        found.append(line)
    return pandas.DataFrame(found).set_index("size")


def break_even(df: pandas.DataFrame) -> dict[int, str]:
    """Break-even length by batch at which the fastest NSA beats the fastest dense attention, as
    text, interpolated between measured ones; batches with a single length are left out."""
    ours, dense = fastest(df, NSA), fastest(df, DENSE)
    found = {}
    for batch, rows in df.drop_duplicates("size").groupby("batch", sort=False):
        rows = rows[rows["size"].isin(ours.index) & rows["size"].isin(dense.index)]
        rows = rows.sort_values("tokens")
        if len(rows) > 1:
            columns = [list(rows["tokens"])]
            columns += [[one[size] for size in rows["size"]] for one in (ours, dense)]
            found[int(batch)] = _words(crossing(*columns))
    return found


def _words(text: str) -> str:
    *before, number = text.split()
    return " ".join([*before, f"{round(float(number)):,}"])


def memory(df: pandas.DataFrame) -> pandas.DataFrame:
    """Table of MiB of one layer's cache: measured, and measured / estimated."""
    rows = df[df["cache_bytes"].notna()].drop_duplicates(["size", "operation", "layout"])
    label = [f"{'dense' if r.operation == DENSE else 'NSA'}, {r.layout}" for r in rows.itertuples()]
    rows = rows.assign(label=label, mib=rows["cache_bytes"] / MIB)
    rows["over"] = rows["cache_bytes"] / rows["foretold_bytes"]
    text = [f"{r.mib:,.2f} ({r.over:.4f})" for r in rows.itertuples()]
    table = rows.assign(text=text).pivot(index="label", columns="size", values="text")
    table = table.loc[list(dict.fromkeys(label)), list(dict.fromkeys(rows["size"]))]
    return table.rename_axis(index=None, columns="MiB (over what was foretold)")


def equal(equals: Sequence[Equal], counted: Counted) -> pandas.DataFrame:
    """Table of the largest differences from the whole sequence at once, in fp64."""
    found = [
        {"decoded by": one.what, "layout": one.layout, "calls": one.steps,
         "largest difference": f"{one.difference:.1e}"}
        for one in (*equals, counted.equal)
    ]  # fmt: skip
    return pandas.DataFrame(found).set_index("decoded by")


def counters(counted: Counted) -> pandas.DataFrame:
    """Table of keys by a small model's counters, beside those by the definition's masks."""
    columns = {
        "last step": counted.last_step, "by the masks": counted.masks_last,
        "in all": counted.in_all, "in all by the masks": counted.masks_all,
    }  # fmt: skip
    return pandas.DataFrame(columns).rename_axis("keys read")


def facts(cells: Sequence[Cell], equals: Sequence[Equal], counted: Counted) -> list[str]:
    """Machine-independent lines."""
    lines = []
    for cell in cells:
        keys = ", ".join(f"{branch} {cell.keys[branch]:,}" for branch in BRANCHES)
        lines.append(f"{cell}: {keys}; dense / NSA {cell.tokens / cell.nsa_keys:.2f}")
        lines.append(f"  cache: {cell.cache_bytes():,} B, dense {cell.dense_bytes:,} B")
    for tokens, paper in PAPER.items():
        ours = Cell(1, tokens).nsa_keys
        lines.append(f"{length(tokens)}: {ours:,} keys, the paper has {paper:,} of {tokens:,}")
    same = sum(one.holds for one in (*equals, counted.equal))
    lines.append(f"equal to the whole at once in fp64: {same} of {len(equals) + 1}")
    lines.append(f"counters of a model: {counted.last_step} a step, {counted.in_all} in all")
    return lines
