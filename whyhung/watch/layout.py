"""Layout of a progress file: 24 counters of 64 bits that a process writes and others read."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from whyhung.watch.evidence import PHASES, P

CELLS = 24
(
    VERSION, STEP, PHASE, MODULES, FIRED, TOTAL, EVENTS, COLLECTIVES,
    ENTERED, BEATS, ASKED, PID, MAIN_THREAD, _, BEGAN_NS,
) = range(15)  # fmt: skip
LAYOUT = 2


def read(file: str | os.PathLike) -> tuple[P, int]:
    """Read (P, beats) from a file that may be written meanwhile; P() and 0 if there is none yet."""
    cells = cells_of(file)
    return (P(), 0) if cells is None else (coordinate(cells), cells[BEATS])


def cells_of(file: str | os.PathLike) -> tuple[int, ...] | None:
    """All counters of a file; None if there are none, or they have another layout."""
    try:
        content = Path(file).read_bytes()
    except OSError:
        return None
    if len(content) != 8 * CELLS:
        return None
    cells = tuple(memoryview(content).cast("q"))
    return cells if cells[VERSION] == LAYOUT else None


def coordinate(cells: tuple[int, ...]) -> P:
    """Convert the counters to a progress coordinate."""
    return P(cells[STEP], PHASES[cells[PHASE]], *cells[MODULES : ENTERED + 1])


def ask(file: str | os.PathLike) -> None:
    """Request data that only the process has; its thread answers when it gets the GIL."""
    with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 8 * CELLS) as mapped:
        cells = memoryview(mapped).cast("q")
        cells[ASKED] += 1
        cells.release()
