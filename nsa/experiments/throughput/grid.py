"""The cells of a throughput run, from lists of what is varied."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from nsa.experiments.throughput.cell import LEAST_WARMUP, TrainCell

DENSE = "dense"


def throughput_grid(
    preset: str,
    backends: Sequence[str],
    tokens: Sequence[int],
    *,
    step_tokens: int,
    long_backends: Sequence[str] = (),
    long_tokens: Sequence[int] = (),
    variants: Sequence[str] = (),
    ranks: Sequence[int] = (1,),
    parallel: Sequence[str] = ("ddp",),
    **fixed: Any,
) -> list[TrainCell]:
    """The cells, in the order of what they decide, for what comes last may find no time.

    First the first of `backends` and its dense twin at each of `tokens`, then `long_backends` at
    each of `long_tokens`, then ranks and variants, last the other backends. "dense" among the
    backends is the dense twin. A step has `step_tokens` tokens where T divides them, else one
    sequence. `variants`, see `TrainCell.with_`, change the first backend at the first T; so does
    each number of ranks above 1, with each kind of `parallel` and as many times the batch.

    ValueError for anything illegal, before any cell runs, and for a grid without cells.
    """

    def plain(name: str, length: int) -> TrainCell:
        dense = {"attention": "dense", "backend": "auto"} if name == DENSE else {"backend": name}
        batch = max(1, step_tokens // length)
        return TrainCell(preset=preset, tokens=length, batch=batch, **dense, **fixed)

    deciding = [name for name in backends if name in (backends[0], DENSE)]
    pairs = dict.fromkeys([*product(tokens, deciding), *product(long_tokens, long_backends)])
    cells = [plain(name, length) for length, name in pairs]
    if not cells:
        raise ValueError(f"no cell to measure: backends={backends}, tokens={tokens}")
    first = cells[0]
    for count, kind in product([count for count in ranks if count != 1], parallel):
        cells.append(first.with_(f"batch:{count * first.batch} ranks:{count} parallel:{kind}"))
    cells += [first.with_(text) for text in variants]
    others = [pair for pair in product(tokens, backends) if pair not in pairs]
    return cells + [plain(name, length) for length, name in dict.fromkeys(others)]


def curve_grid(
    preset: str,
    backends: Sequence[str],
    *,
    tokens: int,
    batch: int,
    steps: int,
    variant: str = "",
    **fixed: Any,
) -> list[TrainCell]:
    """One cell a backend, "dense" being the twin; none where `steps` is 0. `variant` is of all."""
    if not steps:
        return []
    cells = throughput_grid(preset, backends, [tokens], step_tokens=batch * tokens, **fixed)
    return [replace(cell, steps=max(steps, LEAST_WARMUP)).with_(variant) for cell in cells]
