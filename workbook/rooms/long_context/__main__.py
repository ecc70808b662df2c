"""Measure the operation over one sequence on several ranks, and compare it with one rank.

    python -m workbook.rooms.long_context --ranks 4 --tokens 32k,128k,512k --out DIR

needs torch, numpy and jaxtyping alone (and triton on a GPU). DIR/rows.jsonl gets a line for each
cell as soon as it is done, see `child.Subject.measure`; a launch that ends early keeps them.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.parallel.mesh import METHODS
from workbook.lab.measure.shapes import Shape, count
from workbook.rooms.long_context.cells import Cell, cells_of, launch


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("python -m workbook.rooms.long_context", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    option = made.add_argument
    option("--out", required=True, type=Path, help="folder of the rows")
    option("--ranks", type=int, default=2, help="processes of the launch")
    text = "cells on so many of them, in this order, as 4,2,1; by default 1, 2, 4 .. --ranks"
    option("--on", type=_numbers, help=text)
    option("--tokens", type=_words, default=["32k", "128k"], help="T, as 32k,128k,1m")
    option("--methods", type=_words, default=list(METHODS), help=f"of {', '.join(METHODS)}")
    option("--heads-at-once", type=int, help="KV heads that gather holds; by default all")
    for name, size in (("heads", 64), ("kv-heads", 4), ("dim", 128)):
        option(f"--{name}", type=int, default=size, help=f"{size} by default")
    option("--dtype", default="bf16", help="bf16, fp16 or fp32")
    option("--device", choices=("cuda", "cpu"), default="cuda", help="where")
    option("--backend", default="auto", help="of all branches")
    option("--equal-up-to", type=count, default=count("32k"), help="T up to which all is compared")
    option("--deadline", type=float, default=540.0, help="seconds for all")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cells; return 0, 1 if a rank did not end well, 2 for options that cannot be run."""
    given = parser().parse_args(argv)
    try:
        cells = _cells(given)
    except ValueError as error:
        print(f"long_context: {error}", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "rows.jsonl"
    options = {"device": given.device, "backend": given.backend, "equal_up_to": given.equal_up_to}
    options |= {"deadline_s": given.deadline, "folder": given.out / "ranks", "ranks": given.ranks}
    found = launch(cells, file, **options)
    rows = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for row in map(json.loads, rows):
        print(told(row))
    failed = [one for one in found if one["status"] != "ok"]
    for one in failed:
        print(f"rank {one['rank']}: {one['status']}, {one['message']}", file=sys.stderr)
    return int(bool(failed))


def _cells(given: argparse.Namespace) -> list[Cell]:
    sizes = {"heads": given.heads, "kv_heads": given.kv_heads, "dtype": given.dtype}
    sizes |= {"dim": given.dim, "value_dim": given.dim}
    if given.ranks < 1:
        raise ValueError(f"ranks={given.ranks} must be at least 1")
    counts = given.on or [2**n for n in range(given.ranks.bit_length()) if given.ranks % 2**n == 0]
    if other := [n for n in counts if n < 1 or given.ranks % n]:
        raise ValueError(f"--on {other[0]} is no part of {given.ranks} ranks; a divisor would do")
    shapes = [Shape(count(text), **sizes) for text in given.tokens]
    return cells_of(shapes, counts, given.methods, given.heads_at_once)


def told(row: dict[str, Any]) -> str:
    """One line of a row: the cell, ms of both passes, memory, the largest difference."""
    cell = Cell.from_dict(row["cell"])
    if row["outcome"] != "ok":
        return f"{cell}: {row['outcome']}, {row['message']}"
    parts = [f"{name} {ms:.2f} ms" for name, ms in row["ms"].items()]
    parts += [f"{max(row['memory_mib'].values()):.0f} MiB"]
    differ = {name: x for name, x in row.get("difference", {}).items() if name != "rows"}
    if differ:
        parts.append(f"differs by {max(differ.values()):.2g}")
    return f"{cell}: {', '.join(parts)}"


def _numbers(text: str) -> list[int]:
    return [int(part) for part in _words(text)]


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
