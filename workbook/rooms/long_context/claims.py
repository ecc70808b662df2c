"""Claims about a shared sequence: the same result, speed by its aims, memory by its estimate."""

import math
from collections.abc import Sequence
from typing import Any

from nsa.config import NSAConfig
from workbook.lab.measure.shapes import Shape
from workbook.rooms.long_context import table
from workbook.rooms.long_context.cells import Cell, estimate_mib
from workbook.rooms.long_context.trials import device_of, note, on_gpu
from workbook.runs.claim import Claim, aim_of, verdict_of

Rows = Sequence[dict[str, Any]]
EXACT = 1e-12  # of the largest value, in fp64
CLOSE, ROWS = 2.0**-6, 0.001  # of the largest value in 16 bits, given one selection; of queries
FOR = "H100s"  # that the aims are stated for
# Of the faster method, at T on so many ranks: the least efficiency, or the most ms of a pass.
AIMS = (
    ("efficiency", 2**17, 2, 0.95),
    ("efficiency", 2**17, 4, 0.90),
    ("efficiency", 2**19, 2, 0.96),
    ("efficiency", 2**19, 4, 0.93),
    ("forward", 2**20, 4, 950.0),
    ("backward", 2**20, 4, 1950.0),
)
WITHIN = 5.0  # % of the estimate
NO_GPU = "times and memory of a CPU say nothing about a GPU's"
OTHER_SHAPE = "another shape than HQ 64, HKV 4, D 128 in bf16"


def all_claims(rows: Rows) -> list[Claim]:
    """Every claim, in the order of the notebook."""
    found = [equals_one_rank(rows), nothing_broke(rows)]
    found += [reaches(rows, *aim) for aim in AIMS]
    return [*found, holds_what_was_estimated(rows)]


def equals_one_rank(rows: Rows) -> Claim:
    """Claim that ranks compute what one does: in fp64 on CPUs to 1e-12; on GPUs, given one
    selection, to 2^-6 of the largest value, and 0.1 % of queries differ where each side selects.

    Rows of GPUs without a share of queries were compared without one selection, and stand aside.
    """
    worst = {"cpu": 0.0, "gpu": 0.0, "rows": 0.0}
    compared, several, lost = [], [], []
    for row in rows:
        cell = Cell.from_dict(row["cell"])
        if cell.ranks == 1:
            continue
        several.append(str(cell))
        if row["outcome"] != "ok":
            lost.append(str(cell))
        where = "cpu" if device_of(row) == "cpu" else "gpu"
        # A stored NaN is null, and counts as infinitely far.
        found = row.get("difference", {}).items()
        differ = {n: math.inf if x is None or math.isnan(x) else x for n, x in found}
        if not differ or (where == "gpu" and "rows" not in differ):
            continue
        compared.append(str(cell))
        worst["rows"] = max(worst["rows"], differ.pop("rows", 0.0))
        worst[where] = max(worst[where], *differ.values())
    sentence = f"{len(compared)} of {len(several)} cells on several ranks were compared with one: "
    sentence += "output and gradients are the same"
    if not compared:
        return Claim.not_here(sentence, "each is longer than equal_up_to, or of earlier rows")
    if on_gpu(rows):
        sentence += f" but for {worst['gpu']:.2g} of the largest value, at most {CLOSE:.2g}, and "
        sentence += f"{100 * worst['rows']:.2g} % of queries where each selects, at most 0.1 %"
    else:
        sentence += f" in fp64 but for {worst['cpu']:.1e} of the largest value, at most {EXACT:.0e}"
    holds = worst["cpu"] <= EXACT and worst["gpu"] <= CLOSE and worst["rows"] <= ROWS
    return Claim(sentence, verdict_of(holds), {"largest": worst, "cells": compared}).over(lost)


def nothing_broke(rows: Rows) -> Claim:
    """Claim that no cell ended in an error; one without room or time was not measured."""
    ended = {str(Cell.from_dict(row["cell"])): row["outcome"] for row in rows}
    broke = [name for name, how in ended.items() if how not in ("ok", "oom", "timeout", "not run")]
    sentence = f"{len(rows) - len(broke)} of {len(rows)} cells ended without an error"
    if not rows:
        return Claim.undecided(sentence, "there is none")
    lost = [f"{name} ({how})" for name, how in ended.items() if how != "ok"]
    return Claim(sentence, verdict_of(not broke), ended).over(lost)


def reaches(rows: Rows, name: str, tokens: int, ranks: int, bound: float) -> Claim:
    """Claim that the method whose passes together are faster reaches one of AIMS."""
    share = name == "efficiency"
    side = "at least" if share else "at most"

    def told(x: float) -> str:
        return f"{100 * x:.1f} %" if share else f"{x:.0f} ms"

    what, aim = f"at {table.length(tokens)} on {ranks} ranks the {name} is", f"{side} {told(bound)}"
    aimed = [row for row in rows if _is_of_aims(row, tokens)]
    if not on_gpu(rows):
        return Claim.not_here(f"{what} {aim}", NO_GPU)
    found = table.frame(aimed).dropna(subset=name)
    found = found[found.index.get_level_values("ranks") == ranks].droplevel(["T", "ranks"])
    if found.empty:
        lacks = "one rank at that T" if share else "that cell"
        return Claim.not_here(f"{what} {aim}", f"this run lacks {lacks}, or it is of {OTHER_SHAPE}")
    method = found["both"].idxmin()
    value = float(found.loc[method, name])
    sentence = f"{what} {told(value)} by {method}, {aim}, on {note(aimed)}; the aim is for {FOR}"
    holds = value >= bound if share else value <= bound
    return Claim(sentence, aim_of(holds), found[name].to_dict())


def holds_what_was_estimated(rows: Rows) -> Claim:
    """Claim that each rank's peak beyond inputs and outputs is within 5 % of `rank_bytes`."""
    sentence = f"a rank's memory is within {WITHIN:g} % of what was estimated from shapes"
    if not on_gpu(rows):
        return Claim.not_here(sentence, NO_GPU)
    mine = [row for row in rows if row["outcome"] == "ok" and estimate_mib(row)]
    if not mine:
        return Claim.not_here(sentence, "no cell of a GPU ended well")
    off = table.frame(mine)["off, %"].dropna().abs()
    worst = " ".join(map(str, (table.length(off.idxmax()[0]), "on", *off.idxmax()[1:])))
    sentence += f": at {len(off)} cells it is off by {off.max():.2f} % at most ({worst})"
    evidence = {" ".join(map(str, at)): round(x, 3) for at, x in off.items()}
    return Claim(sentence, aim_of(off.max() <= WITHIN), evidence)


def _is_of_aims(row: dict[str, Any], tokens: int) -> bool:
    shape = Cell.from_dict(row["cell"]).shape
    aimed = Shape(tokens, config=NSAConfig(), queries=shape.queries, seed=shape.seed)
    return shape == aimed and device_of(row) != "cpu"
