"""Tables and intervals of the comparison. Draws nothing."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np
import pandas

from workbook.rooms.quality.cells import BASE, BYTES, CONTROLS, DENSE, Cell
from workbook.rooms.quality.planted import DENSITY, KINDS, PAIRS
from workbook.runs.looks import length

Rows = Sequence[dict[str, Any]]
# Student's t at 97.5 %, by degrees of freedom, up to ten seeds.
T975 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Interval:
    """Mean of a number over seeds, and its 95 % interval by Student's t; infinite for one seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.values) if self.values else math.nan

    @property
    def half(self) -> float:
        count = len(self.values)
        if count < 2:
            return math.inf
        return T975[min(count, len(T975)) - 1] * stdev(self.values) / math.sqrt(count)

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def told(self, form: str = ".4f") -> str:
        """The mean with half the interval, or with the number of seeds if that is one."""
        if len(self.values) < 2:
            return f"{self.mean:{form}} (one seed)" if self.values else "none"
        return f"{self.mean:{form}} ± {self.half:{form.lstrip('+')}}"


def of(rows: Rows, variant: str, tokens: int) -> dict[int, dict[str, Any]]:
    """Rows of a variant that ended well, by seed."""
    mine = [
        row for row in rows if (row["cell"]["variant"], row["cell"]["tokens"]) == (variant, tokens)
    ]
    return {row["cell"]["seed"]: row for row in mine if row["outcome"] == "ok"}


def lengths(rows: Rows) -> list[int]:
    return sorted({row["cell"]["tokens"] for row in rows})


def variants(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["cell"]["variant"] for row in rows))


def compared(rows: Rows, tokens: int) -> list[str]:
    """NSA, and each other variant that was trained at this length on two seeds or more and is
    neither dense attention nor a control."""
    seeds = Counter(row["cell"]["variant"] for row in rows if row["cell"]["tokens"] == tokens)
    others = [name for name, count in seeds.items() if count > 1 and name not in (BASE, *CONTROLS)]
    return [BASE, *(name for name in others if not name.startswith(DENSE))]


def over_seeds(rows: Rows, variant: str, tokens: int, value: Callable[[dict], float]) -> Interval:
    """A number of each seed's row."""
    return Interval(tuple(value(row) for row in of(rows, variant, tokens).values()))


def text_of(row: dict[str, Any]) -> str:
    """Digest of the text that a row was trained and evaluated on; "" where it is not known."""
    return row.get("data", {}).get("sha256", {}).get("held-out", "")


def pairs(rows: Rows, one: str, other: str, tokens: int) -> list[tuple[dict, dict]]:
    """Rows of both variants, seed by seed, that saw the same bytes in the same order."""
    first, second = of(rows, one, tokens), of(rows, other, tokens)
    both = [(first[seed], second[seed]) for seed in sorted(first.keys() & second)]
    return [(x, y) for x, y in both if text_of(x) == text_of(y)]


def paired(
    rows: Rows, one: str, other: str, tokens: int, value: Callable[[dict], float]
) -> Interval:
    """Differences one - other of the seeds that both have, on the same text."""
    return Interval(tuple(value(x) - value(y) for x, y in pairs(rows, one, other, tokens)))


def bits(row: dict[str, Any]) -> float:
    return row["bits"]


def accuracy(kind: str, times: int = 1) -> Callable[[dict], float]:
    """Reader of a task's accuracy at so many times the trained length."""
    return lambda row: row["tasks"][kind][str(times * row["cell"]["tokens"])][0]


def falls(row: dict[str, Any], start: int) -> float:
    """Bits a byte in the bucket that ends at `start`, less those in the last one."""
    curve = {
        int(end): value for end, value in row["by_position"][str(row["cell"]["tokens"])].items()
    }
    return curve[start] - curve[max(curve)]


def at_seconds(row: dict[str, Any], seconds: float) -> float:
    """Bits a byte after so many seconds of training, between its looks."""
    _, when, values = zip(*row["curve"], strict=True)
    return float(np.interp(seconds, when, values))


def equal_minutes(rows: Rows, tokens: int, variant: str = BASE) -> Interval:
    """Differences variant - dense after the seconds that the faster of the two took.

    The slower one's rate has not fallen to its end there, so this favours the faster one.
    """
    found = []
    for mine, its in pairs(rows, variant, DENSE, tokens):
        seconds = min(row["curve"][-1][1] for row in (mine, its))
        found.append(at_seconds(mine, seconds) - at_seconds(its, seconds))
    return Interval(tuple(found))


def overview(rows: Rows) -> pandas.DataFrame:
    """Table, a line per length and variant: bits a byte, difference from dense, tasks, speed; and
    the texts, by letters, where rows of several machines are of several."""
    texts = list(dict.fromkeys(text_of(row) for row in rows if row["outcome"] == "ok"))
    lines = []
    for tokens in lengths(rows):
        for variant in variants(rows):
            mine = over_seeds(rows, variant, tokens, bits)
            ended = [
                r["outcome"]
                for r in rows
                if r["cell"]["variant"] == variant and r["cell"]["tokens"] == tokens
            ]
            if not ended:
                continue
            line = {"T": length(tokens), "arm": variant, "seeds": len(mine.values)}
            if len(texts) > 1:
                seen = {texts.index(text_of(row)) for row in of(rows, variant, tokens).values()}
                line["text"] = ", ".join(chr(ord("A") + number) for number in sorted(seen))
            line["diverged"] = ended.count("diverged")
            line["bits a byte"] = mine.told()
            dense = paired(rows, variant, DENSE, tokens, lambda row: 100 * row["bits"])
            base = over_seeds(rows, DENSE, tokens, bits).mean
            line["over dense, %"] = Interval(tuple(v / base for v in dense.values)).told("+.2f")
            for kind in KINDS:
                line[kind] = over_seeds(rows, variant, tokens, accuracy(kind)).told(".2f")
            speeds = [
                r["tokens_s"] * r.get("bytes_per_token", 1)
                for r in of(rows, variant, tokens).values()
                if r["tokens_s"]
            ]
            line["kB/s"] = f"{mean(speeds) / 1e3:,.0f}" if speeds else ""
            lines.append(line)
    return pandas.DataFrame(lines).set_index(["T", "arm"])  # as committed tables


def notes(rows: Rows) -> pandas.DataFrame:
    """Table of cells without a number, and why."""
    lines = [
        {"cell": Cell.from_dict(row["cell"]).name, "outcome": row["outcome"],
         "message": row.get("message", "")}
        for row in rows if row["outcome"] != "ok"
    ]  # fmt: skip
    return pandas.DataFrame(lines, columns=["cell", "outcome", "message"]).set_index("cell")


def selected(rows: Rows) -> pandas.DataFrame:
    """Table of what layers select, means over seeds: gates, unions, forced and chosen; with the
    variant where there is another than NSA."""
    lines, shown = [], [(n, variant) for n in lengths(rows) for variant in compared(rows, n)]
    several = any(variant != BASE for _, variant in shown)
    for tokens, variant in shown:
        mine = list(of(rows, variant, tokens).values())
        for at in mine[0]["selections"] if mine else ():
            layers = [row["selections"][at] for row in mine]
            for number, same in enumerate(zip(*layers, strict=True)):
                line = {"T": length(tokens)} | ({"variant": variant} if several else {})
                line |= {"read at": length(int(at)), "layer": number}
                gates = np.mean([one["gates"] for one in same], 0)
                line |= dict(zip(("g_cmp", "g_slc", "g_win"), gates.round(2), strict=True))
                line["entropy"] = round(mean(one["entropy"] for one in same), 2)
                for n in same[0]["union_mean"]:
                    line[f"union of {n}"] = round(mean(one["union_mean"][n] for one in same), 1)
                for name in ("forced", "first_anyway", "local_anyway"):
                    line[name] = round(mean(one[name] for one in same), 2)
                lines.append(line)
    return pandas.DataFrame(lines)


def covered(rows: Rows) -> pandas.DataFrame:
    """Table of dense attention's layers, means over seeds: its share beyond the window, and of that
    what NSA's blocks would hold, chosen by averaged keys / the best there are."""
    lines = []
    for tokens in lengths(rows):
        mine = [row for row in of(rows, DENSE, tokens).values() if "coverage" in row]
        for number, same in enumerate(zip(*(row["coverage"] for row in mine), strict=True)):
            line = {"T": length(tokens), "layer": number}
            line["beyond the window"] = f"{mean(one[BASE]['far'] for one in same):.2f}"
            for variant in same[0]:
                held = (mean(one[variant][name] for one in same) for name in ("chosen", "best"))
                line[variant] = " / ".join(f"{share:.2f}" for share in held)
            lines.append(line)
    return pandas.DataFrame(lines)


def facts(cells: Sequence[Cell], parameters: dict[str, int]) -> list[str]:
    """Machine-independent lines."""
    first = cells[0]
    lines = [f"{variant}: {count:,} parameters" for variant, count in parameters.items()]
    lines.append(f"{len(cells)} cells of {first.steps} steps, {first.batch} rows of {first.tokens}")
    ids = "bytes" if first.vocab == BYTES else f"tokens (of {first.vocab} ids)"
    lines.append(f"{ids} a parameter: {first.bytes / parameters[BASE]:.2f}")
    lines.append(f"planted: a task in {DENSITY} {ids} of training text; recall asks {PAIRS} facts")
    return lines


def parameters_of(cells: Sequence[Cell]) -> dict[str, int]:
    """Number of parameters by variant."""
    import torch

    from nsa.model.llama import LanguageModel, parameter_count

    found = {}
    for cell in cells:
        with torch.device("meta"):
            found.setdefault(cell.variant, parameter_count(LanguageModel(cell.config())))
    return found
