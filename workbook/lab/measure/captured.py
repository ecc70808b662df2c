"""Queries that select as a trained model's do: an AR(1) process whose coefficient changes.

    python -m workbook.lab.measure.captured rows.jsonl

reads what the layers of trained models selected (`workbook.rooms.quality`), fits the process to it,
and writes captured.json beside this file; `queries="captured"` of a Shape exists from then on.

Neighbours with coefficient 1 select the same blocks, with 0 unrelated ones. A trained model has
both, in different layers, heads and places, so each run of RUN tokens and KV head draws its
coefficient from a table of COUNT, fitted so that UNITED neighbours together select as many distinct
blocks, tile by tile, as the model's: the histogram is reproduced, not its mean alone. Keys stay
white. What more or fewer neighbours select follows from the process, and is not fitted.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.reference.compress import Phi, compress_keys
from workbook.lab import todays
from workbook.lab.measure.attention_inputs import (
    importance_at,
    mean_union,
    select_at,
)
from workbook.lab.measure.selections import UNITED, union_histogram
from workbook.lab.measure.shapes import CAPTURED, Shape

COUNT = 64  # coefficients of a table, of equal weight
GRID = np.concatenate(([0.0], np.logspace(-5, 0, 21)))  # 1 - coefficient
ROUNDS = 6  # of the fit
Histogram = dict[int, int]


def histograms(rows: Iterable[Mapping[str, Any]], variant: str = "nsa") -> dict[int, Histogram]:
    """{T: {distinct blocks of UNITED neighbours: tiles}} over the layers and seeds of a variant."""
    found: dict[int, Counter[int]] = {}
    for row in rows:
        if row["outcome"] == "ok" and row["cell"]["variant"] == variant:
            for tokens, layers in row["selections"].items():
                into = found.setdefault(int(tokens), Counter())
                for layer in layers:
                    into.update({int(n): c for n, c in layer["union"][str(UNITED)].items()})
    return {tokens: dict(sorted(counts.items())) for tokens, counts in found.items()}


def real(histogram: Histogram, tokens: int, config: NSAConfig) -> Histogram:
    """The histogram without the tiles at a sequence's start, which select every block there is."""
    tiles = sum(histogram.values())
    a_block = tiles * config.select_block / tokens  # tiles in each block of tokens
    left = {n: c - (a_block if n <= config.select_count else 0) for n, c in histogram.items()}
    return {n: c for n, c in left.items() if c > 0.5}


def quantiles(histogram: Mapping[int, float], count: int = COUNT) -> np.ndarray:
    """Numbers of blocks at `count` equal steps of the histogram's cumulated share."""
    numbers = np.array(sorted(histogram))
    share = np.cumsum([histogram[n] for n in numbers])
    places = (np.arange(count) + 0.5) / count * share[-1]
    return numbers[np.searchsorted(share, places)].astype(float)


def distance(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Mean difference of two histograms' quantiles, over the mean of the second."""
    first, second = (quantiles(x, 1000) for x in (one, other))
    return float(np.abs(first - second).mean() / second.mean())


def simulated(coefficients: Sequence[float], shape: Shape, tiles: int, seed: int = 0) -> Histogram:
    """Histogram of tiles of UNITED queries drawn with each coefficient, at even places of one
    sequence with white keys, whose first select_count blocks are left out."""
    found = union_histogram(_blocks(coefficients, shape, tiles, seed), UNITED)
    return {int(n): count for n, count in found.items()}


def _blocks(coefficients: Sequence[float], shape: Shape, tiles: int, seed: int) -> Tensor:
    """Blocks [coefficients, tiles * UNITED, 1, n] that such queries select."""
    config, count = shape.config, len(coefficients)
    random = torch.Generator().manual_seed(seed)
    k = torch.randn(1, shape.tokens, 1, shape.dim, generator=random)
    k_cmp = compress_keys(k, Phi(), config).expand(count, -1, -1, -1)
    first = config.select_block * config.select_count // UNITED
    starts = torch.linspace(first, shape.tokens // UNITED - 1, tiles).long().unique() * UNITED
    rows = (starts[:, None] + torch.arange(UNITED)).flatten()
    a = torch.tensor(coefficients, dtype=torch.float32)[:, None, None, None]
    e = torch.randn(UNITED, count, len(starts), shape.group, shape.dim, generator=random)
    x = [e[0]]
    for new in e[1:]:
        x.append(a * x[-1] + (1 - a * a).clamp(min=0).sqrt() * new)
    q = torch.stack(x, 2).flatten(1, 2)  # [coefficients, rows, G, D]
    return select_at(importance_at(q, k_cmp, rows, shape.tokens, config), rows, config)


def fit(histogram: Histogram, shape: Shape, tiles: int = 64) -> list[float]:
    """COUNT coefficients whose queries reproduce the histogram at the shape's sizes, ascending in
    the number of blocks. Deterministic."""
    blocks = _blocks((1 - GRID).tolist(), shape, tiles, seed=0)
    curve = [mean_union(one[None], UNITED) for one in blocks]
    curve = np.maximum.accumulate(curve) + 1e-6 * np.arange(len(GRID))
    wanted = quantiles(real(histogram, shape.tokens, shape.config))
    target, best = wanted.copy(), (np.inf, [])
    for turn in range(ROUNDS):
        found = (1 - np.interp(target, curve, GRID)).tolist()
        made = simulated(found, shape, max(4, tiles // 4), seed=turn)
        away = float(np.abs(quantiles(made) - wanted).mean())
        best = min(best, (away, found))
        # Its own scatter widens what was asked for: ask for less, quantile by quantile.
        target = np.maximum.accumulate(target + 0.7 * (wanted - quantiles(made)))
    return best[1]


def store(rows: Sequence[Mapping[str, Any]], file: Path = CAPTURED, **sizes: int) -> dict[str, Any]:
    """Fit each length of the rows, at a shape of HQ 64, HKV 4, D 128 or `sizes`; write the file:
    {"variant", "cells", "lengths": {T: {"union", "coefficients", "distance"}}}. ValueError for rows
    in which nothing is selected."""
    least = 2 * Shape(1, **sizes).config.select_count * Shape(1, **sizes).config.select_block
    found = {n: histogram for n, histogram in histograms(rows).items() if n >= least}
    if not found:
        raise ValueError(
            f"the rows hold no selections of the variant 'nsa' at {least} tokens or more, where "
            "there is a choice; train and evaluate one"
        )
    content: dict[str, Any] = {"variant": "nsa", "neighbours": UNITED, "lengths": {}}
    content["cells"] = [row["cell"] for row in rows if row["cell"]["variant"] == "nsa"]
    for tokens, histogram in found.items():
        shape = Shape(tokens, **sizes)
        fitted = fit(histogram, shape)
        made = simulated(fitted, shape, 32, seed=99)
        away = distance(made, real(histogram, tokens, shape.config))
        line = {"union": histogram, "coefficients": [round(a, 6) for a in fitted]}
        content["lengths"][str(tokens)] = line | {"distance": round(away, 4)}
        print(f"T {tokens}: the histogram is reproduced to {away:.1%}", flush=True)
    file.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return content


if __name__ == "__main__":
    texts = [Path(name).read_text(encoding="utf-8") for name in sys.argv[1:]]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    store([row | {"cell": todays(row["cell"])} for row in rows])
