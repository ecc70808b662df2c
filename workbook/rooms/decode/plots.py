"""Figures of the decoding notebook, in the common style."""

from collections.abc import Sequence

import numpy as np
import pandas

from workbook.rooms.decode import table
from workbook.rooms.decode.cells import BRANCHES, PLAIN, Cell
from workbook.rooms.decode.child import DENSE, NSA
from workbook.rooms.decode.claims import AIMS
from workbook.rooms.decode.trials import Result
from workbook.runs import looks
from workbook.runs.looks import GREY, PALETTE

MIB = 2**20
SHORT = {"cmp": "compressed", "slc": "selected", "win": "window"}
COLOURS = dict(zip(BRANCHES, PALETTE, strict=False))
LIMIT_LOOKS = {NSA: ("#000000", "limit of NSA"), DENSE: ("#9a9a9a", "limit of dense")}
OF_DENSE = "time, dense at the shortest = 1"


def latency(results: Sequence[Result], note: str, on_gpu: bool):
    """Plot step time against the cached length, log-log, a panel for each batch with two lengths or
    more; on a CPU relative to dense attention at the shortest. Failures are crosses at the top."""
    df = table.frame(results)
    lengths = df.groupby("batch", sort=False)["tokens"].nunique()
    batches = list(lengths[lengths > 1].index) or list(lengths.index[:1])
    names = list(dict.fromkeys(df["name"]))
    with looks.figure(len(batches), 3.6) as (fig, panels):
        for axes, batch in zip(panels, batches, strict=True):
            rows = df[df["batch"] == batch].sort_values("tokens")
            _times(axes, rows, names, on_gpu)
            looks.title(axes, f"{batch} sequence{'s' * (batch > 1)}, a new token each", note)
    return fig


def _times(axes, rows: pandas.DataFrame, names: list[str], on_gpu: bool) -> None:
    unit = 1.0
    if not on_gpu:
        dense = rows[(rows["operation"] == DENSE) & rows["ms"].notna()]
        unit = float(dense["ms"].iloc[0]) if len(dense) else 1.0
    failing = []
    for name in names:
        line = rows[rows["name"] == name]
        colour, marker = looks.series(names.index(name))
        good = line[line["ms"].notna()]
        style = ":" if (line["operation"] == DENSE).all() else "-"
        options = {"color": colour, "marker": marker}
        axes.plot(good["tokens"], good["ms"] / unit, style, label=name, zorder=3, **options)
        if on_gpu and (line["layout"] == PLAIN).all() and (line["operation"] == NSA).all():
            eager = line[line["eager_ms"].notna()]
            options |= {"lw": 0.8, "ms": 3, "alpha": 0.6, "label": f"{name}, eager"}
            axes.plot(eager["tokens"], eager["eager_ms"], "--", **options)
        lost = line[line["ms"].isna()]
        if len(lost):
            failing.append((name, lost["tokens"], lost["outcome"]))
    for operation, (colour, label) in LIMIT_LOOKS.items():
        line = rows[rows["operation"] == operation].drop_duplicates("tokens")
        if on_gpu and len(line):
            axes.plot(line["tokens"], line["limit_ms"], "--", color=colour, label=label, lw=1.1)
    if not on_gpu and rows["ms"].notna().any():
        dense = rows[rows["operation"] == DENSE].drop_duplicates("tokens")
        if len(dense):
            by_bytes = dense["read"] / dense["read"].iloc[0]
            axes.plot(dense["tokens"], by_bytes, "--", color="#9a9a9a", label="bytes of dense")
    axes.set(xlabel="cached tokens", ylabel="ms a step" if on_gpu else OF_DENSE)
    axes.set_xscale("log", base=2)
    looks.log_axis(axes.yaxis)
    looks.crosses(axes, failing, rows["tokens"])
    looks.plain_ticks(axes, rows["tokens"])


def sizes(results: Sequence[Result], note: str, on_gpu: bool):
    """Plot each step's time as a multiple of its limit, a row per size; on a CPU, of the fastest
    dense one. Aims are rings if the run has their sizes."""
    df = table.frame(results)
    order, names = list(dict.fromkeys(df["size"])), list(dict.fromkeys(df["name"]))
    dense = table.fastest(df, DENSE)
    with looks.figure(1, 0.9 + 0.34 * len(order)) as (fig, (axes,)):
        for row in df[df["ms"].notna()].itertuples():
            below = row.limit_ms if on_gpu else dense.get(row.size, np.nan)
            colour, marker = looks.series(names.index(row.name))
            height = order.index(row.size) + 0.09 * (names.index(row.name) - len(names) / 2)
            axes.plot(row.ms / below, height, marker, color=colour, label=row.name)
        for result in results if on_gpu else ():
            for aim in (aim for aim in AIMS if aim.fits(result.cell)):
                at = aim.ms / result.limit_ms(NSA), order.index(str(result.cell))
                axes.plot(
                    *at, "o", mfc="none", ms=12, color=looks.RED, label="aim of NSA on an H200"
                )
        axes.axvline(1, color=GREY, ls=":")
        what = "time over its own limit by bytes" if on_gpu else "time over dense attention's"
        axes.set(xlabel=what, yticks=range(len(order)), yticklabels=order)
        axes.set_ylim(len(order) - 0.4, -0.6)
        axes.set_ylabel("sequences x cached tokens")
        looks.log_axis(axes.xaxis)
        looks.title(axes, "Every size", note)
    return fig


def memory(results: Sequence[Result]):
    """Plot, left, a layer's cache in MiB per sequence against its length, measured and estimated;
    right, keys that a step reads, by branch."""
    df = table.frame(results)
    with looks.figure(2, 3.4) as (fig, (left, right)):
        rows = df[df["cache_bytes"].notna()].drop_duplicates(["size", "operation", "layout"])
        curves = rows.groupby(["operation", "layout"], sort=False)
        for number, ((operation, layout), line) in enumerate(curves):
            line = line.sort_values("tokens").drop_duplicates("tokens")
            colour, marker = looks.series(number)
            name = "dense" if operation == DENSE else f"NSA, {layout}"
            options = {"color": colour, "marker": marker, "ls": "none", "label": name}
            left.plot(line["tokens"], line["cache_bytes"] / line["batch"] / MIB, **options)
            estimated = line["foretold_bytes"] / line["batch"] / MIB
            left.plot(line["tokens"], estimated, "--", color=colour, lw=1)
        left.set(xlabel="cached tokens", ylabel="MiB a sequence and layer")
        looks.title(left, "Cache: measured (dots), estimated (lines)")
        cells = sorted({r.cell.tokens: r.cell for r in results}.values(), key=lambda c: c.tokens)
        lengths = [cell.tokens for cell in cells]
        for branch in BRANCHES:
            keys = [cell.keys[branch] for cell in cells]
            options = {"color": COLOURS[branch], "marker": "."}
            right.plot(lengths, keys, label=f"{SHORT[branch]} keys", **options)
        right.plot(lengths, [c.nsa_keys for c in cells], "k-", marker="o", label="NSA, together")
        right.plot(lengths, lengths, ":", color=GREY, label="dense: every key")
        right.set(xlabel="cached tokens", ylabel="keys that a step reads")
        looks.title(right, "Keys read by a KV head of a sequence")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            if len(cells):
                looks.log_axis(axes.yaxis)
            looks.plain_ticks(axes, lengths)
    return fig


def which_are_read(results: Sequence[Result]):
    """Plot the cached positions that the newest token of the first sequence reads, at the longest
    measured length: a bar per branch and KV head. None if no selection is known."""
    known = [(r.cell, row) for r in results for row in r.rows if "blocks" in row]
    if not known:
        return None
    cell, row = max(known, key=lambda one: one[0].tokens)
    config, heads = cell.config, row["blocks"][:8]
    with looks.figure(1, 1.1 + 0.28 * len(heads)) as (fig, (axes,)):
        axes.figure.set_figwidth(10.5)
        _compressed(axes, cell, len(heads))
        for number, blocks in enumerate(heads):
            spans = [(j * config.select_block, config.select_block) for j in blocks if j >= 0]
            _bars(axes, cell, spans, number, "slc", "selected tokens")
        window = [(max(0, cell.tokens - config.window), min(config.window, cell.tokens))]
        _bars(axes, cell, window, -1, "win", "window, all heads")
        rows = ["window", *(f"KV head {n}" for n in range(len(heads))), "compressed"]
        axes.set(
            xlabel="position in the cache", xlim=(0, cell.tokens), ylim=(len(heads) + 0.6, -1.6)
        )
        axes.set_yticks(range(-1, len(heads) + 1), rows)
        step = max(1, cell.tokens // 8)
        ticks = range(0, cell.tokens + 1, step)
        axes.set_xticks(ticks, list(map(looks.length, ticks)))
        axes.grid(axis="y", visible=False)
        share = cell.nsa_keys / cell.tokens
        looks.title(axes, f"What one new token reads of {looks.length(cell.tokens)}: {share:.1%}")
    return fig


def _bars(axes, cell: Cell, spans: list[tuple[int, int]], row: int, branch: str, name: str) -> None:
    """Draw ranges of positions as bars of at least a visible width."""
    least = cell.tokens / 700
    spans = [(start, max(size, least)) for start, size in spans]
    axes.broken_barh(spans, (row - 0.35, 0.7), color=COLOURS[branch], lw=0, label=name)


def _compressed(axes, cell: Cell, row: int) -> None:
    """Draw keys of the compressed branch, one for d tokens, as a band of height 1/d."""
    config = cell.config
    height = max(0.7 / config.compress_stride, 0.08)
    label = f"compressed, all heads: one key for {config.compress_stride} tokens"
    end = (cell.keys["cmp"] - 1) * config.compress_stride + config.compress_block
    band = [(0, end)], (row - height / 2, height)
    axes.broken_barh(*band, color=COLOURS["cmp"], lw=0, label=label)
