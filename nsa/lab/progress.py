"""How far a training has come, counted in a file that others can read while it is stuck.

The counters live in an mmap: whoever reads them needs no word from the process, which may hold the
GIL, be stopped, or be dead. A stack says where a process is; only counters say whether it moves.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import Any

from nsa.lab.evidence import PHASES, P

CELLS = 16
(
    VERSION, STEP, PHASE, MODULES, FIRED, TOTAL, EVENTS, COLLECTIVES,
    ENTERED, BEATS, ASKED, ANSWERED, PEAK_BYTES, PID,
) = range(14)  # fmt: skip
LAYOUT = 1
EVERY_S = 0.1  # between two beats
MOST_HOOKS = 4096  # of one backward: more of them would tell nobody more
NUMBER = {name: number for number, name in enumerate(PHASES)}


class Progress:
    """Counts what a training does into `file`: steps, phases, modules, autograd nodes, events.

    Feed it by hand, `step`, `phase`, `watch`, `backward`, `event`, `collective`; or give it to a
    Trainer as an observer; or call `attach`, and it counts whatever this process does: every
    module's forward, every backward, every optimizer step.

    A beat a tenth of a second comes from a thread that needs the GIL: it tells a process that
    computes from one in which C code keeps it. The thread also reads the sequence number of the
    process group, and answers `ask`.
    """

    def __init__(self, file: str | os.PathLike, *, rank: int = 0) -> None:
        self.file, self.rank = Path(file), rank
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "w+b") as opened:
            opened.truncate(8 * CELLS)
            self._mapped = mmap.mmap(opened.fileno(), 8 * CELLS)
        self.cells = memoryview(self._mapped).cast("q")
        self.cells[STEP] = -1
        self.cells[PID] = os.getpid()
        self.cells[VERSION] = LAYOUT
        self._told = False  # somebody names the phases: then none is guessed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="progress", daemon=True)
        self._thread.start()

    def step(self, number: int) -> None:
        """A step begins: its modules and nodes are counted from 0."""
        cells = self.cells
        cells[MODULES] = cells[FIRED] = cells[TOTAL] = 0
        cells[STEP] = number
        if not self._told:
            self._enter("other")

    def phase(self, name: str) -> None:
        """One of PHASES begins. From then on none is guessed from modules and backwards."""
        if name not in NUMBER:
            raise ValueError(f"phase={name!r} is none of {', '.join(PHASES)}")
        self._told = True
        self._enter(name)

    def _enter(self, name: str) -> None:
        self.cells[PHASE] = NUMBER[name]
        self.cells[ENTERED] += 1

    def watch(self, model: Any) -> None:
        """Counts the modules of `model` whose forward ends."""

    def backward(self, loss: Any, *args: Any, **options: Any) -> None:
        """loss.backward(), whose nodes are counted."""
        loss.backward(*args, **options)

    def event(self) -> None:
        """Something was done; on a GPU it counts when the device has come that far."""
        self.cells[EVENTS] += 1

    def collective(self) -> None:
        """A collective was enqueued that no process group counts."""
        self.cells[COLLECTIVES] += 1

    def beat(self) -> None:
        """Says by hand that the interpreter runs; a thread does it anyway."""
        self.cells[BEATS] += 1

    def attach(self) -> None:
        """Counts every module, backward and optimizer step of this process, whoever makes them."""

    def on_start(self, trainer: Any) -> None:
        """As an observer of a Trainer: watches its model."""
        self.watch(trainer.model)

    def on_phase(self, name: str, step: int) -> None:
        if name == "data":
            self.step(step)
        self.phase(name if name in NUMBER else "other")

    def on_step(self, step: int, loss: Any) -> None:
        self.event()

    def close(self) -> None:
        """Stops the thread and takes all hooks away; the file stays."""
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.cells[BEATS] += 1


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
    )
