"""Claims of the decoding notebook, each decided by measurements."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas

from nsa.config import NSAConfig
from workbook.rooms.decode import table
from workbook.rooms.decode.cells import PAPER, PLAIN, Cell
from workbook.rooms.decode.child import DENSE, NSA
from workbook.rooms.decode.equality import SAME, Counted, Equal
from workbook.rooms.decode.trials import Result
from workbook.runs import metrics
from workbook.runs.claim import Claim, NotHere, Undecided, aim, claim
from workbook.runs.rules import NO_VALUE, NOT_OF_THIS_RUN, needs_gpu, needs_h200

MEMORY = 0.01  # fraction of the estimate
PAGES = 1.05  # of the contiguous layout's time
BEYOND = 1.12  # of a copy's bandwidth: pure reads are faster, up to 4.8 vs 4.27 TB/s on an H200
TRITON = "triton"


@dataclass(frozen=True)
class Aim:
    """Target in ms of one step in a CUDA graph on one H200, and times of torch's dense attention
    and the fastest public NSA: HQ 64, HKV 4, D 128, bf16, l 32, d 16, l' 64, n 16, w 512."""

    batch: int
    tokens: int
    ms: float
    public_ms: float
    dense_ms: float

    def fits(self, cell: Cell) -> bool:
        mine = (cell.batch, cell.tokens, cell.heads, cell.kv_heads, cell.dim, cell.dtype)
        return mine == (self.batch, self.tokens, 64, 4, 128, "bf16") and cell.config == NSAConfig()

    def __str__(self) -> str:
        return str(Cell(self.batch, self.tokens))


K = 1024
AIMS = (
    Aim(1, 8 * K, 0.018, 0.047, 0.019),
    Aim(1, 64 * K, 0.025, 0.070, 0.052),
    Aim(8, 64 * K, 0.050, 0.085, 0.258),
    Aim(32, 64 * K, 0.135, 0.169, 0.952),
    Aim(64, 32 * K, 0.165, 0.204, 0.959),
    Aim(256, 8 * K, 0.320, 0.418, 0.979),
    Aim(16, 128 * K, 0.125, 0.156, 0.971),
)


def all_claims(results: Sequence[Result], equals: Sequence[Equal], counted: Counted) -> list[Claim]:
    """Claims that must hold in any run."""
    df = table.frame(results)
    return [
        equals_the_whole(equals, counted.equal),
        is_accurate(df),
        nothing_broke(df),
        reads_only_its_keys(results),
        reads_as_the_paper_says(results),
        memory_is_estimated(df, counted),
        counters_count(counted),
    ]


def aims(results: Sequence[Result], gpu: str) -> list[Claim]:
    """Performance aims on an H200; `gpu` is the device's name, empty on a CPU."""
    df = table.frame(results)
    return [
        *(reaches(results, aim, gpu) for aim in AIMS),
        pages_cost_little(df, gpu),
        nothing_beats_the_limit(df, gpu),
        time_shrinks_too(df, gpu),
    ]


@claim("in fp64 a sequence that is decoded equals the whole at once, by every backend and layout "
       f"and in a model, to {SAME:.0e}")  # fmt: skip
def equals_the_whole(equals: Sequence[Equal], model: Equal):
    """Claim that decoding equals the whole sequence at once, in fp64 up to the order of sums."""
    every = [*equals, model]
    found = f"{len(every)} ways"
    if not equals:
        raise Undecided(NO_VALUE, found=found)
    worst = max(every, key=lambda one: one.difference)
    evidence = {"furthest": f"{worst.what}, {worst.layout}", "difference": worst.difference}
    return found, all(one.holds for one in every), evidence


@claim("each step at its own length keeps the accuracy rule")
def is_accurate(df: pandas.DataFrame):
    """Claim that steps stay within twice plain torch's error vs fp64, checked before timing."""
    ran = df[df["error"].notna()]
    found = f"{len(ran)} measured"
    if red := _messages(df[df["outcome"] == "red"]):
        return f"{found}; wrong: {', '.join(red)}", False, red
    if not len(ran):
        raise Undecided(NO_VALUE, found=found)
    most = {"largest share of what is allowed": round(ran["error"].max(), 3)}
    return found, True, most, _lost(df, "error")


@claim("every step of ours ran or said why it does not")
def nothing_broke(df: pandas.DataFrame):
    """Claim that our backends run or decline with a reason; out of memory is a valid outcome."""
    mine = df[(df["operation"] == NSA) & ~df["name"].str.startswith("peer ")]
    if broken := _messages(mine[mine["outcome"] == "error"]):
        return f"; broke off: {', '.join(broken)}", False, broken
    lost = _messages(mine[mine["outcome"] == "not run"])
    if not len(mine) or lost:
        raise Undecided(f"{len(lost)} were not run", lost)
    return "", True, mine["outcome"].value_counts().to_dict()


@claim("a step reads the keys that the prediction counts and no others: with NaN in all other rows "
       "its output is the same to the bit, with NaN in one of those it is not")  # fmt: skip
def reads_only_its_keys(results: Sequence[Result]):
    """Claim that a step reads only its keys: with NaN elsewhere its output is bitwise the same."""
    found = [(r.cell, row) for r in results for row in r.rows if "reads" in row]
    if not found:
        asked = any(row["operation"] == NSA for r in results for row in r.rows)
        ended = [row for r in results for row in r.rows if row["outcome"] != "ok"]
        if asked and ended:
            raise Undecided(NO_VALUE)
        raise NotHere("the backends that were chosen load all keys under masks")
    wrong, spoilt = {}, 0
    for cell, row in found:
        reads = row["reads"]
        spoilt += reads["spoilt"]
        counted = all(reads["keys"][branch] == cell.keys[branch] for branch in reads["keys"])
        if not (counted and reads["same"] and reads["seen"]):
            wrong[f"{row['name']} at {cell}"] = reads
    evidence = wrong or {"steps": len(found), "rows that were NaN": spoilt}
    if not wrong and not spoilt:
        raise NotHere("every cached key was to be read")
    names = {row["name"] for _, row in found}
    lost = [f"{row['name']} at {r.cell}" for r in results for row in r.rows
            if row["name"] in names and "reads" not in row]  # fmt: skip
    return "", not wrong, evidence, lost


@claim("a step reads as many times fewer keys than dense attention as the paper says")
def reads_as_the_paper_says(results: Sequence[Result]):
    """Claim that reads match the paper's Table 4 of tokens loaded, at the lengths of this run."""
    found = {}
    usual = [result for result in results if result.cell.config == NSAConfig()]
    for result in usual:
        tokens = result.cell.tokens
        if tokens in PAPER and any("reads" in row for row in result.rows):
            found[tokens] = tokens / result.cell.nsa_keys
    if not found:
        raise NotHere("no length of the paper's table was measured")
    paper = {tokens: tokens / PAPER[tokens] for tokens in found}
    said = ", ".join(f"{found[t]:.1f} at {t // K}k (the paper {paper[t]:.1f})" for t in found)
    holds = all(abs(found[t] / paper[t] - 1) < 0.005 for t in found)
    lost = sorted({result.cell.tokens for result in usual} & {*PAPER} - {*found})
    return said, holds, {str(t): x for t, x in found.items()}, (f"T {t}" for t in lost)


@claim(f"a cache takes the estimated bytes, to {MEMORY:.0%}")
def memory_is_estimated(df: pandas.DataFrame, counted: Counted):
    """Claim that estimated bytes match a layer's cache in the allocator and a small model's."""
    rows = df[df["cache_bytes"].notna() & (df["operation"] == NSA)]
    if not len(rows):
        raise Undecided(NO_VALUE)
    over = rows["cache_bytes"] / rows["foretold_bytes"]
    at = rows.loc[(over - 1).abs().idxmax()]
    model = counted.held_bytes / counted.foretold_bytes
    worst = max(float((over - 1).abs().max()), abs(model - 1))
    evidence = {"caches": len(rows), "furthest": f"{at['layout']} at {at['size']}"}
    evidence |= {"off by": worst, "a model's, held / estimated": model}
    return "", worst <= MEMORY, evidence, _lost(df[df["operation"] == NSA], "cache_bytes")


@claim("the counters of a cache tell the keys that the definition's masks show, in the last step "
       "and in all, and its bytes")  # fmt: skip
def counters_count(counted: Counted):
    """Claim that the counters match the definition's masks when a small model decodes."""
    same = (counted.last_step, counted.in_all) == (counted.masks_last, counted.masks_all)
    whole = abs(counted.bytes / counted.held_bytes - 1) <= MEMORY  # beside the host's bookkeeping
    evidence = {"last step": counted.last_step, "in all": counted.in_all, "bytes": counted.bytes}
    return "", same and whole, evidence


@aim("triton at {aim}")
def reaches(results: Sequence[Result], aim: Aim, gpu: str):
    """Claim that the slower of contiguous and paged caches reaches the aim, in a CUDA graph."""
    wanted = f"aim {aim.ms:g} ms, best public {aim.public_ms:g}, dense {aim.dense_ms:g}"
    needs_h200(gpu, found=wanted)
    mine = [row for r in results if aim.fits(r.cell) for row in r.rows]
    mine = [row for row in mine if row["name"].partition(",")[0] == TRITON]
    if not mine:
        raise NotHere(NOT_OF_THIS_RUN, found=wanted)
    ms = {row["layout"]: row["ms"]["graph"][0] for row in mine if "graph" in row["ms"]}
    if PLAIN not in ms or len(ms) < len(mine):
        raise Undecided(NO_VALUE, ms, wanted)
    paged = max((x for layout, x in ms.items() if layout != PLAIN), default=None)
    said = f"{ms[PLAIN]:.3g} ms" + (f", {paged:.3g} in pages" if paged is not None else "")
    return f"{said} ({wanted})", max(ms.values()) <= aim.ms, ms


@aim(f"pages are at most {PAGES - 1:.0%} slower than a contiguous cache")
def pages_cost_little(df: pandas.DataFrame, gpu: str):
    """Claim that paged caches take at most PAGES times as long, in CUDA graphs of one process."""
    needs_gpu(gpu)
    mine = df[df["name"].str.partition(",")[0] == TRITON]
    plain = mine[mine["layout"] == PLAIN].set_index("size")["graph_ms"]
    paged = mine[mine["layout"] != PLAIN]
    if not len(paged) or not len(plain):
        raise NotHere(NOT_OF_THIS_RUN)
    ratio = paged["graph_ms"] / paged["size"].map(plain)
    if ratio.isna().any():
        raise Undecided(NO_VALUE)
    at = paged.loc[ratio.idxmax()]
    found = f"at most {ratio.max():.3f} times, {at['layout']} at {at['size']}"
    evidence = {
        f"{row.layout} at {row.size}": round(float(x), 3)
        for row, x in zip(paged.itertuples(), ratio, strict=True)
    }
    lost = metrics.unmeasured(mine.assign(median=mine["graph_ms"]), ["size"], ["layout"])
    return found, ratio.max() <= PAGES, evidence, lost


@claim(f"no step is faster than its bytes over {BEYOND} times the bandwidth of a copy")
def nothing_beats_the_limit(df: pandas.DataFrame, gpu: str):
    """Claim that no step beats the limit; a faster one would not load the counted keys."""
    needs_gpu(gpu)
    rows = df[df["ms"].notna()]
    if not len(rows):
        raise Undecided(NO_VALUE)
    share = rows["limit_ms"] / rows["ms"]
    at = rows.loc[share.idxmax()]
    found = f"the nearest is {at['name']} at {at['size']} with {share.max():.0%} of it"
    return found, share.max() <= BEYOND, {}, _lost(df, "ms")


@aim("at 64k a step is as many times faster than dense attention as the paper's 11.6 of keys, "
     "launches and all")  # fmt: skip
def time_shrinks_too(df: pandas.DataFrame, gpu: str):
    """Claim that the speedup over dense at 64k reaches 11.6, the paper's ratio of bytes."""
    needs_gpu(gpu)
    rows = df[df["tokens"] == 64 * K]
    ratio = (table.fastest(rows, DENSE) / table.fastest(rows, NSA)).dropna()
    if not len(ratio):
        raise NotHere(NOT_OF_THIS_RUN)
    found = ", ".join(f"{x:.1f} times at {size}" for size, x in ratio.items())
    evidence = {size: round(float(x), 2) for size, x in ratio.items()}
    # The fastest of both counts; a slower dense attention would flatter the result.
    lost = _lost(rows[~rows["name"].str.startswith("peer ")], "ms")
    return found, ratio.max() >= 11.6, evidence, lost


def _lost(df: pandas.DataFrame, column: str) -> list[str]:
    """Steps that lack a number, except those that do not run."""
    return metrics.unmeasured(df.assign(median=df[column]), ["name"], ["size"])


def _messages(rows: pandas.DataFrame) -> dict[str, str]:
    return {f"{row.name} at {row.size}": row.message for row in rows.itertuples()}
