"""Tells when a training stands still, by its own pace, and where; nothing is ended.

What it costs is a thread that looks at a clock. Who waits for whom, and whether it can ever go on,
is what `whyhung attach PID --all-ranks` and `whyhung watch` find out, which look from outside.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nsa.lab.observers.stacks_on_signal import stacks

STEPS = 50  # whose slowest is the pace
FACTOR = 5.0  # so many times the slowest step is no longer slow
LEAST_S = 60.0  # a hiccup of a disk or a network takes seconds
POLL_S = 1.0


class Watchdog:
    """An observer that reports a step which takes FACTOR times the slowest of the last STEPS.

    A step counts from its "data" to the next one's, so what lies between two steps does, too; in
    `aside` nothing is judged. Before one step has ended there is no pace to judge by. A report is a
    line on stderr, the stacks of all threads in `file`, and a row of `reports`; one more line says
    when the run goes on. Native code that never gives up the GIL silences it, as it does the
    heartbeat.
    """

    def __init__(
        self,
        file: str | os.PathLike | None = None,
        rank: int = 0,
        judges: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reports: list[dict[str, Any]] = []
        self._file, self._rank, self._clock = file and Path(file), rank, clock
        self._judges = judges  # False: it only notes where the run is
        self._seconds: deque[float] = deque(maxlen=STEPS)
        # step, phase, the step's start, whether it is judged: one assignment, for the thread reads
        self._place: tuple[int | None, str, float, bool] = (None, "", clock(), False)
        self._told: dict[str, Any] | None = None  # the report of this step
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def on_start(self, trainer: Any) -> None:
        if not self._judges:
            return
        self._thread = threading.Thread(target=self._run, name="nsa:watchdog", daemon=True)
        self._thread.start()

    def on_phase(self, name: str, step: int) -> None:
        before, _, began, judged = self._place
        if name != "data":
            self._place = (step, name, began, judged)
            return
        now = self._clock()
        self._goes_on(now - began)
        if judged and before is not None:
            self._seconds.append(now - began)
        self._place = (step, name, now, True)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Around what is no step: an evaluation, a checkpoint."""
        step, phase, began, _ = self._place
        self._goes_on(self._clock() - began)
        self._place = (step, phase, began, False)
        try:
            yield
        finally:
            self._place = (None, phase, self._clock(), False)

    def bound_s(self) -> float | None:
        """How long a step may take; None before one has ended."""
        return max(LEAST_S, FACTOR * max(self._seconds)) if self._seconds else None

    def check(self) -> None:
        """Reports the step that takes too long, once."""
        (step, phase, began, judged), bound = self._place, self.bound_s()
        seconds = self._clock() - began
        if not judged or bound is None or seconds <= bound or self._told is not None:
            return
        report = {"step": step, "phase": phase, "rank": self._rank, "seconds": seconds}
        self._told = report | {"bound_s": bound, "lasted_s": None}
        self.reports.append(self._told)
        self._say(
            f"step {step} stands still in {phase!r}: {seconds:.0f} s, {FACTOR:g} times the slowest "
            f"of the last {len(self._seconds)} steps is {bound:.0f} s"
            + (f"; stacks are in {self._file}" if self._file else "")
            + f"; whyhung attach {os.getpid()} --all-ranks says who waits for whom"
        )
        if self._file is not None:
            with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as out:
                out.write(f"step {step}, {phase}, after {seconds:.0f} s\n{stacks()}\n")

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _goes_on(self, lasted_s: float) -> None:
        if self._told is not None:
            self._told["lasted_s"] = lasted_s
            self._say(f"step {self._told['step']} went on after {lasted_s:.0f} s")
            self._told = None

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"nsa: rank {self._rank}: {text}", file=sys.stderr, flush=True)

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            with contextlib.suppress(Exception):  # whatever it is, the training goes on
                self.check()
