"""Cells of the long-context notebook: a shape, the ranks that share it, the bytes they send, and
those that one of them holds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nsa.blocks import count_compressed, count_selectable
from nsa.parallel.mesh import METHODS
from nsa.spelling import choice
from whyhung.process.ranks import run_ranks
from workbook.lab.measure.shapes import Shape

ENTRY = "workbook.rooms.long_context.child:measure_rank"  # of each rank
WIDE = 4  # bytes of a gradient that ranks add, and of a statistic of a query and head
TASK = 512, 1024  # tokens that the kernels sum at a time for a selected block, by `inverse`


@dataclass(frozen=True)
class Cell:
    """One operation over a sequence of `shape.tokens` tokens on `ranks` ranks.

    Raises ValueError for an unknown method, for ranks that do not divide the sequence into chunks
    of whole blocks, and for KV heads that the method cannot split.
    """

    shape: Shape
    ranks: int = 1
    method: str = "gather"
    heads_at_once: int | None = None  # KV heads whose keys and values "gather" holds; None: all

    def __post_init__(self) -> None:
        choice("method", self.method, METHODS)
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks} must be at least 1")
        unit = 2 * self.ranks * self.shape.config.select_block
        if self.ranks > 1 and self.shape.tokens % unit:
            raise ValueError(
                f"tokens={self.shape.tokens} on {self.ranks} ranks are no chunks of whole blocks; "
                f"a multiple of {unit} would do"
            )
        parts = self.ranks if self.method == "ulysses" else self.heads_at_once or 1
        if self.shape.kv_heads % parts:
            name = "ranks" if self.method == "ulysses" else "heads_at_once"
            raise ValueError(
                f"{name}={parts} does not divide kv_heads={self.shape.kv_heads} for method="
                f"{self.method!r}"
            )

    @property
    def own(self) -> Shape:
        """Shape of one rank's rows."""
        return replace(self.shape, tokens=self.shape.tokens // self.ranks)

    def sent_bytes(self) -> dict[str, int]:
        """Bytes that one rank receives: {"forward", "backward"}.

        "gather": keys and values of the other ranks, and their compressed ones; backward the same
        numbers in fp32. "ulysses": its heads' part of q, k, v, gates and o from the others.
        """
        shape, others = self.shape, self.ranks - 1
        size, kv = shape.torch_dtype.itemsize, shape.kv_heads * (shape.dim + shape.value_dim)
        rows = shape.batch * shape.tokens // self.ranks
        if self.method == "ulysses":
            a_row = shape.heads * (shape.dim + shape.value_dim + 3) + kv
            sent = others * rows * a_row * size // self.ranks
            return {"forward": sent, "backward": sent}
        compressed = shape.batch * count_compressed(shape.tokens, shape.config) // self.ranks
        numbers = others * (rows + compressed) * kv
        return {"forward": numbers * size, "backward": numbers * WIDE}

    def to_dict(self) -> dict:
        """Return plain, JSON-compatible values; `from_dict` restores an equal cell."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "Cell":
        return cls(**values | {"shape": Shape.from_dict(values["shape"])})

    def __str__(self) -> str:
        how = "" if self.ranks == 1 else f" {self.method}"
        held = f" {self.heads_at_once} KV heads at once" * (self.heads_at_once is not None)
        return f"T={self.shape.tokens} on {self.ranks}{how}{held}"


def cells_of(
    shapes: Iterable[Shape],
    ranks: Sequence[int],
    methods: Sequence[str],
    heads_at_once: int | None = None,
) -> list[Cell]:
    """Cells of each shape on each number of ranks, in their order; by each method on several.

    Raises ValueError for none, for a number that does not divide the largest, whose launch all
    cells share, and for what `Cell` refuses.
    """
    if not ranks or min(ranks) < 1:
        raise ValueError(f"ranks={list(ranks)} must be one number or more, of at least 1")
    if most := [n for n in ranks if max(ranks) % n]:
        raise ValueError(f"ranks={most[0]} does not divide {max(ranks)}, that all cells share")
    found = []
    for shape in shapes:
        for count in dict.fromkeys(ranks):
            for method in methods if count > 1 else ["gather"]:
                held = heads_at_once if count > 1 and method == "gather" else None
                found.append(Cell(shape, count, method, held))
    return found


def launch(
    cells: Sequence[Cell],
    file: Path,
    *,
    device: str,
    backend: str,
    equal_up_to: int,
    deadline_s: float,
    folder: Path,
    ranks: int | None = None,
) -> list[dict[str, Any]]:
    """Measure cells in one launch, of the largest one's ranks by default; rank 0 appends a row for
    each to the file, which is made anew. Returns how each rank ended, see `run_ranks`."""
    file.unlink(missing_ok=True)
    spec = {"cells": [cell.to_dict() for cell in cells], "device": device, "backend": backend}
    spec |= {"equal_up_to": equal_up_to, "file": str(file.resolve())}
    count = ranks or max(cell.ranks for cell in cells)
    return run_ranks(ENTRY, spec, ranks=count, deadline_s=deadline_s, folder=folder)


def rank_bytes(cell: Cell) -> dict[str, int]:
    """Bytes beyond inputs and outputs that a rank holds at the peak of {"forward", "backward"},
    computed from shapes for the Triton kernels and one sequence, nothing fitted.

    The forward's peak is at its end: what each call keeps, see `_kept`, and with "gather" the
    outputs of its two chunks beside the whole, and all keys and values; with "ulysses" q, k, v,
    gates and o by heads, and o once more as it is sent. The backward's is inside the tail chunk's
    call, see `_during`, or where "gather" adds the gradients of all keys and values in fp32, by
    ranks, and receives as many. With
    `heads_at_once` its backward is left out.
    """
    shape, size = cell.shape, cell.shape.torch_dtype.itemsize
    whole = _keys_and_values(shape) * size
    compressed = _compressed(shape) * size
    if cell.method == "ulysses" and cell.ranks > 1:
        own = replace(shape, heads=shape.heads // cell.ranks, kv_heads=shape.kv_heads // cell.ranks)
    else:
        own = cell.own
    q, o, gates = (own.tokens * own.heads * n * size for n in (own.dim, own.value_dim, 3))
    outputs = q + gates + whole // cell.ranks
    if cell.ranks == 1 or cell.method == "ulysses":
        kept = _kept(own) + compressed // (1 if cell.ranks == 1 else cell.ranks)
        sent = 0 if cell.ranks == 1 else outputs + o
        last = _statistic(own) if cell.ranks == 1 and size == 2 else 0  # unit of a partial sum
        do = 0 if cell.ranks == 1 else o
        forward = kept + (sent + do or last)
        return {"forward": forward, "backward": kept + sent + do + _during(own, own) - outputs}
    chunk = replace(own, tokens=own.tokens // 2)
    held = 2 * _kept(chunk) + o + whole + compressed
    forward = max(held, 2 * whole + compressed)
    if cell.heads_at_once is not None:
        return {"forward": forward + o}
    seen = (whole + compressed) * (2 * cell.ranks + 1) // (2 * cell.ranks)  # by head and tail
    adding = seen + 2 * whole // size * WIDE - whole // cell.ranks
    return {"forward": forward, "backward": max(held + _during(chunk, shape) - outputs, adding)}


def estimate_mib(row: Mapping[str, Any]) -> dict[str, float]:
    """`rank_bytes` of a row's cell in MiB; empty unless it was measured on a GPU."""
    if "sending" not in row or row["cell"]["shape"]["batch"] > 1:
        return {}
    found = rank_bytes(Cell.from_dict(row["cell"]))
    return {name: held / 2**20 for name, held in found.items()}


def _keys_and_values(shape: Shape) -> int:
    return shape.tokens * shape.kv_heads * (shape.dim + shape.value_dim)


def _compressed(shape: Shape) -> int:
    rows = count_compressed(shape.tokens, shape.config)
    return rows * shape.kv_heads * (shape.dim + shape.value_dim)


def _statistic(shape: Shape) -> int:
    """Bytes of one fp32 number a query and head."""
    return WIDE * shape.tokens * shape.heads


def _kept(shape: Shape) -> int:
    """Bytes that a forward keeps beside o: o of the compressed branch, 8 more bits of o, a
    log-sum-exp a branch, the selection, and its unions over small and large tiles."""
    rows = shape.tokens * shape.heads * shape.value_dim
    narrow, slots = shape.torch_dtype.itemsize == 2, _slots(shape)
    fixed = shape.torch_dtype == torch.bfloat16
    of_cmp = rows * (2 if fixed else WIDE) + fixed * _statistic(shape)
    tiles = 1 if shape.group > 32 else 2
    return of_cmp + narrow * rows + 3 * _statistic(shape) + 4 * slots * (1 + 2 * tiles)


def _slots(shape: Shape) -> int:
    return shape.tokens * shape.kv_heads * shape.config.select_count


def _during(queries: Shape, keys: Shape) -> int:
    """Most bytes that a backward of these queries holds beside what was kept: gradients, gates in
    fp32 and the inverse of the selection; and dK and dV of compressed keys by query head, in fp32,
    or dQ and the sums of blocks that many queries selected."""
    size, slots, statistic = queries.torch_dtype.itemsize, _slots(queries), _statistic(queries)
    keys = replace(keys, heads=queries.heads, kv_heads=queries.kv_heads)
    dkv = size * (2 * _keys_and_values(keys) + _compressed(keys))
    both = dkv + statistic // WIDE * 3 * (size + WIDE) + 4 * slots
    task = min(max(1 << max(0, (slots // 1024) - 1).bit_length(), TASK[0]), TASK[1])
    full = slots // task
    lists = count_selectable(keys.tokens, keys.config) * keys.kv_heads
    sums = min(lists + full, 2 * full) * keys.config.select_block * (keys.dim + keys.value_dim)
    dq = size * queries.tokens * queries.heads * queries.dim
    by_head = statistic + WIDE * queries.group * _compressed(keys)
    return both + max(by_head, 4 * statistic + dq + WIDE * sums)
