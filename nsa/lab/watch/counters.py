"""The file in which a process counts its progress: where each number is, and how to read it.

Sixty-four bits each, in this machine's order. One process writes, anybody reads.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from nsa.lab.watch.evidence import PHASES, P

CELLS = 24
(
    VERSION, STEP, PHASE, MODULES, FIRED, TOTAL, EVENTS, COLLECTIVES,
    ENTERED, BEATS, ASKED, PID, MAIN_THREAD, LISTENS, BEGAN_NS, MADE,
) = range(16)  # fmt: skip
LAYOUT = 1
NUMBER = {name: number for number, name in enumerate(PHASES)}


def read(file: str | os.PathLike) -> tuple[P, int]:
    """(P, beats) out of a file that somebody may be writing; P() and 0 where there is none yet."""
    cells = cells_of(file)
    return (P(), 0) if cells is None else (coordinate(cells), cells[BEATS])


def cells_of(file: str | os.PathLike) -> tuple[int, ...] | None:
    """All counters; None where there are none, or of another layout."""
    try:
        content = Path(file).read_bytes()
    except OSError:
        return None
    if len(content) != 8 * CELLS:
        return None
    cells = tuple(memoryview(content).cast("q"))
    return cells if cells[VERSION] == LAYOUT else None


def coordinate(cells: tuple[int, ...]) -> P:
    """The counters as a progress coordinate."""
    return P(
        step=cells[STEP],
        phase=PHASES[cells[PHASE]],
        modules=cells[MODULES],
        fired=cells[FIRED],
        total=cells[TOTAL],
        events=cells[EVENTS],
        collectives=cells[COLLECTIVES],
        phases=cells[ENTERED],
        made=cells[MADE],
    )


def ask(file: str | os.PathLike) -> None:
    """Asks the process for what only it can tell; answered by its thread, if that gets the GIL."""
    with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 8 * CELLS) as mapped:
        cells = memoryview(mapped).cast("q")
        cells[ASKED] += 1
        cells.release()
