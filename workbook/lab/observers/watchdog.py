"""Report a training that stalls, judged by its own pace, and where; nothing is ended.

The cost is a thread that reads a clock. Which rank waits for which, and whether the training can
ever go on, is found from outside by `whyhung attach PID --all-ranks` and `whyhung watch`.
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

from workbook.lab.observers.stacks_on_signal import stacks

STEPS = 50  # whose median, or slowest, is the pace
FACTOR = 5.0  # multiple of the slowest step at which a step counts as stalled
LEAST_S = 60.0  # a hiccup of a disk or a network takes seconds
POLL_S = 1.0


class Beside:
    """Observer that records where the run is, and a thread that checks it every few seconds.

    A step lasts from its "data" to the next one's, so the time between two steps is included.
    """

    def __init__(self, name: str, poll_s: float, clock: Callable[[], float]) -> None:
        self._name, self._poll_s, self._clock = name, poll_s, clock
        # step, phase, its start, the step's start or None: one assignment, for the thread reads it
        self._place: tuple[int | None, str, float, float | None]
        self._place = (None, "before the first step", clock(), None)
        self._seconds: deque[float] = deque(maxlen=STEPS)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; do nothing if it runs already."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def on_phase(self, name: str, step: int) -> None:
        now, began = self._clock(), self._place[3]
        if name == "data":
            if began is not None:
                self._seconds.append(now - began)
            began = now
        self._place = (step, name, now, began)

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _look(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        while True:
            # Neither a full disk nor a closed terminal is a reason to fall silent.
            with contextlib.suppress(Exception):
                self._look()
            if self._stop.wait(self._poll_s):
                return


class Watchdog(Beside):
    """Observer that reports a step which takes FACTOR times the slowest of the last STEPS.

    Inside `aside` nothing is judged, and neither is anything before one step has ended. A report is
    a line on stderr, the stacks of all threads in `file`, and a row of `reports`; another line
    follows when the run goes on. Native code that never releases the GIL silences it, as it does
    the heartbeat.
    """

    def __init__(
        self,
        file: str | os.PathLike | None = None,
        rank: int = 0,
        judges: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """judges: if False, only record where the run is."""
        super().__init__("nsa:watchdog", POLL_S, clock)
        self.reports: list[dict[str, Any]] = []
        self._file, self._rank, self._judges = file and Path(file), rank, judges
        self._told: dict[str, Any] | None = None  # the report of this step

    def on_start(self, trainer: Any) -> None:
        if self._judges:
            self.start()

    def on_phase(self, name: str, step: int) -> None:
        if name == "data":
            self._goes_on()
        super().on_phase(name, step)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Suspend the watchdog for work outside of steps: an evaluation, a checkpoint."""
        self._goes_on()
        step, phase, *_ = self._place
        self._place = (step, phase, self._clock(), None)
        try:
            yield
        finally:
            self._place = (None, phase, self._clock(), None)

    def bound_s(self) -> float | None:
        """Longest time that a step may take, in seconds; None before one has ended."""
        return max(LEAST_S, FACTOR * max(self._seconds)) if self._seconds else None

    def check(self) -> None:
        """Report the current step if it takes too long, once."""
        (step, phase, _, began), bound = self._place, self.bound_s()
        if began is None or bound is None or self._told is not None:
            return
        if (seconds := self._clock() - began) <= bound:
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

    _look = check

    def _goes_on(self) -> None:
        began = self._place[3]
        if self._told is not None and began is not None:
            self._told["lasted_s"] = lasted_s = self._clock() - began
            self._say(f"step {self._told['step']} went on after {lasted_s:.0f} s")
            self._told = None

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"nsa: rank {self._rank}: {text}", file=sys.stderr, flush=True)
