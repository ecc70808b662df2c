"""The cells of a sweep, from lists of what is varied."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from nsa.attention.registry import check_name
from nsa.experiments.memory.cell import Cell


def limits(longest: Sequence[str]) -> dict[str, int]:
    """["sequential:256"] as {"sequential": 256}; ValueError for anything else."""
    found = {}
    for text in longest:
        name, _, tokens = text.partition(":")
        if not (tokens.isascii() and tokens.isdigit()) or int(tokens) < 1:
            raise ValueError(f"longest={text!r} must read backend:T, as in sequential:256")
        found[check_name(name)] = int(tokens)
    return found


def memory_grid(
    presets: Sequence[str],
    layers: Sequence[int],
    backends: Sequence[str],
    tokens: Sequence[int],
    *,
    longest: Sequence[str] = (),
    **fixed: Any,
) -> list[Cell]:
    """One cell for each preset, number of layers, backend and T, in that order.

    `longest` keeps a backend out of longer T than it names, see `limits`. `layers`
    may be empty: each preset's own number. `fixed` holds the other fields of every cell. ValueError
    for anything illegal, before any cell runs, and for a grid without cells.
    """
    most = limits(longest)
    cells = [
        Cell(preset=preset, layers=depth, backend=backend, tokens=length, **fixed)
        for preset, depth, backend, length in product(presets, layers or [None], backends, tokens)
        if length <= most.get(backend, length)
    ]
    if not cells:
        raise ValueError(
            f"no cell to measure: presets={list(presets)}, backends={list(backends)}, "
            f"tokens={list(tokens)}, longest={list(longest)}"
        )
    return cells
