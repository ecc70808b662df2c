"""What the case study's loop printed, and what a reader of it could take for a hang.

Its script wrote a debug line at the start of the first five steps and a loss at step 1 and at
every twentieth. Between step 5 and step 20 a healthy run is silent, however long a step takes.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

_LINE = re.compile(r"^(?:\[debug\] )?step 0*(\d+)\b")


@dataclass(frozen=True)
class PrintSchedule:
    """Steps count from 1: a debug line at the start of steps 1 to `first`, a loss at the end of
    step 1 and of every `every`-th."""

    first: int = 5
    every: int = 20

    def __post_init__(self) -> None:
        if self.first < 0 or self.every < 1:
            raise ValueError(
                f"first={self.first}, every={self.every}: `first` must be at least 0, `every` at "
                "least 1; the case study's are 5 and 20"
            )

    def at_start(self, step: int) -> bool:
        return step <= self.first

    def at_end(self, step: int) -> bool:
        return step == 1 or step % self.every == 0

    def last_line(self, started: int, ended: int) -> int | None:
        """The step of the last line, once `started` steps have begun and `ended` of them are over.

        None before the first line. This is the step at which the run will be said to hang.
        """
        lines = [step for step in range(1, started + 1) if self.at_start(step)]
        lines += [step for step in range(1, ended + 1) if self.at_end(step)]
        return max(lines, default=None)

    def silences(self, steps: int) -> list[tuple[int, int]]:
        """(line, next line) wherever more than one step passes between two lines."""
        lines = [s for s in range(1, steps + 1) if self.at_start(s) or self.at_end(s)]
        return [(a, b) for a, b in pairwise(lines) if b - a > 1]

    def debug(self, step: int, shape: Iterable[int]) -> str:
        return f"[debug] step {step}: input {tuple(shape)}"

    def loss(self, step: int, loss: float, rate: float) -> str:
        return f"step {step:04d} | loss {loss:.4f} | lr {rate:.2e}"


CASE_STUDY = PrintSchedule()


def last_step(text: str) -> int | None:
    """The step of the last line of a console; None where no line names one."""
    found = [int(m[1]) for m in map(_LINE.match, text.splitlines()) if m]
    return found[-1] if found else None
