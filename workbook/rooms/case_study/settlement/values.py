"""Functions for the `value` expressions of facts.yaml, applied to the sources named there.

Microseconds an operation rest on operations that were counted in the case study's code, of which no
record is here; the loop rebuilt here dispatches about half as many (335,529 at T 1024 where 725,490
are quoted), so no time of the one is compared with a count of the other, and facts on the rebuilt
loop use ratios within it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import sub
from statistics import correlation, linear_regression, mean, median, stdev
from typing import Any

from workbook.rooms.case_study.figures import Timing, estimate_mib, held_out_us
from workbook.rooms.case_study.loop.design import MIB, parameters, production
from workbook.rooms.case_study.loop.design import peak_mib as predicted_mib
from workbook.rooms.case_study.loop.subject import PrintSchedule
from workbook.runs.scaling import fit_exponent, local_exponents

Rows = Sequence[Mapping[str, Any]]
BLOCK = 512  # allocation granularity in bytes
peak_mib = cache(predicted_mib)
last_line = PrintSchedule().last_line


def furthest(ratios: Iterable[float]) -> float:
    """Largest of |ratio - 1|."""
    return max(abs(ratio - 1) for ratio in ratios)


# Memory.
def copies_off(peaks: Mapping) -> float:
    return furthest(peak_mib(*size) / mib for size, mib in peaks.items())


def estimator_off(table: Mapping[int, float], estimator: Sequence[float]) -> float:
    return furthest(estimate_mib(tokens, estimator) / mib for tokens, mib in table.items())


def forced_off(tokens: int, pairs: Iterable[Sequence[float]]) -> float:
    """Largest error, MiB, of predicting both - forced: each token's output of three branches, and
    what the gate's MLP keeps of it (its input, and before and after SiLU)."""
    design = production(5)
    gate = (design.groups * design.head_dim, *2 * [design.groups * design.head_dim // 2])
    each = 3 * 4 * design.dim + sum(BLOCK * -(-4 * n // BLOCK) for n in gate)
    predicted = design.layers * tokens * each / MIB
    return max(abs(both - forced - predicted) for both, forced in pairs)


def saved_off(recorded: Mapping, tables: Mapping) -> float:
    """Largest |ratio - 1| of expandable segments' savings to the difference of the two reports."""
    saved = {
        int(t): variants["default"] - variants["expandable"] for t, variants in recorded.items()
    }
    return furthest(saved[t] / (one - other) for t, (one, other) in tables.items())


def default_off(recorded: Mapping, table: Mapping[int, float]) -> float:
    return furthest(variants["default"] / table[int(t)] for t, variants in recorded.items())


@cache
def tensors(layers: int) -> int:
    """Parameter tensors of the rebuilt production design."""
    import torch

    from workbook.rooms.case_study.loop.model import LoopModel

    with torch.device("meta"):
        return sum(1 for _ in LoopModel(production(layers)).parameters())


# Time.
def microseconds(timings: Iterable[Timing], counts: Mapping) -> list[float]:
    """Microseconds an operation of each timing."""
    return [1e6 * t.seconds / (t.layers * counts[t.design, t.tokens]) for t in timings]


def constant_off(each: Sequence[float]) -> float:
    return furthest(p / us for p, us in zip(held_out_us(each), each, strict=True))


def totals_r2(scaling: Mapping) -> float:
    return correlation(list(scaling), [total for _, _, total in scaling.values()]) ** 2


def twelve_over_line(scaling: Mapping) -> float:
    totals = {layers: total for layers, (_, _, total) in scaling.items()}
    twelve = totals.pop(12)
    line = linear_regression(list(totals), list(totals.values()))
    return twelve / (line.intercept + 12 * line.slope)


def over_limit(timings: Iterable[Timing], deadlines: Iterable[Sequence]) -> float:
    """Smallest ratio of a step's seconds, for a step that was called a hang, to its limit, in that
    same configuration or with half its batch."""
    return min(
        t.seconds / limit
        for _, layers, tokens, _, limit in deadlines
        for t in timings
        if (t.layers, t.tokens) == (layers, tokens)
    )


def slowest(timings: Iterable[Timing], layers: int) -> float:
    return max(t.seconds for t in timings if t.layers == layers)


def rtx_over_a100(timings: Sequence[Timing], counts: Mapping) -> float:
    by_gpu: dict[str, list[float]] = {}
    for timing, us in zip(timings, microseconds(timings, counts), strict=True):
        by_gpu.setdefault(timing.gpu, []).append(us)
    return median(by_gpu["RTX 3090"]) / median(by_gpu["A100"])


def students_t(costs: Sequence[float]) -> float:
    return abs(mean(costs)) / (stdev(costs) / math.sqrt(len(costs)))


# Rows of tables and of trials.
def first(rows: Iterable[Sequence], key: Any) -> Sequence:
    """First row that begins with `key`."""
    return next(row for row in rows if row[0] == key)


def column(table: Mapping, key: Any) -> list:
    return [row[key] for row in table.values() if row is not None]


def named(names: Iterable[str], missing: Iterable[str]) -> int:
    return sum(any(real in name for real in names) for name in missing)


def cell(found: Mapping, path: str, tokens: int) -> Mapping[str, Any]:
    """Row of the trial `operations`, with one sequence; LookupError if there is none."""
    for row in found["rows"]:
        if (row["path"], row["tokens"], row["batch"]) == (path, tokens, 1):
            return row
    raise LookupError(f"no row of {path} at T {tokens}, batch 1")


def a_token(found: Mapping, key: str) -> float:
    """Increase of that figure of the loop per further token, from T 64 to 128."""
    return (cell(found, "loop", 128)[key] - cell(found, "loop", 64)[key]) / 64


def off_policy(rows: Rows) -> float:
    """Largest distance in steps of the last line before step 13 from its print policy's `first`."""
    return max(abs((row["last_line_at_step_13"] or 0) - row["first"]) for row in rows)


def last_lines(rows: Rows) -> int:
    return len({row["last_line_at_step_13"] for row in rows})


def fewest_ended(rows: Rows) -> int:
    return min(int(row["lines"][-1].split()[1]) for row in rows)


def lines_apart(rows: Rows, by: str) -> int:
    """Number of console lines in which the plain loop differs from dense masks (by "path") or from
    itself with checkpointing, under one policy."""
    plain = {"path": "loop", "checkpoint": False}
    other = plain | ({"path": "masked"} if by == "path" else {"checkpoint": True})
    variants = [[r["lines"] for r in rows if r["first"] == 5 and r == r | variant][-1]
            for variant in (plain, other)]  # fmt: skip
    return sum(a != b for a, b in zip(*variants, strict=True))


def otherwise(rows: Rows) -> int:
    """Number of things that changed and should not have, or the other way round."""
    return sum(row["changed"] != row["should"] for row in rows)


def growth(rows: Rows, what: str) -> float:
    row = {row["what"]: row for row in rows}[what]
    return row["after"] - row["before"]


def not_finite(found: Mapping, names: Iterable[str]) -> int:
    return sum(not math.isfinite(float(found[name])) for name in names)


FUNCTIONS: dict[str, Callable] = {
    one.__name__: one
    for one in (
        abs, len, map, max, min, set, sum, a_token, cell, column, constant_off, copies_off,
        default_off, estimator_off, fewest_ended, first, fit_exponent, forced_off, growth,
        last_line, last_lines, lines_apart, local_exponents, median, microseconds, named,
        not_finite, off_policy, otherwise, over_limit, parameters, peak_mib, production,
        rtx_over_a100, saved_off, slowest, students_t, sub, tensors, totals_r2, twelve_over_line,
    )
}  # fmt: skip
