"""Time of a step, split by phase."""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from workbook.lab.measure.timing import mark

KEPT = 10_000  # steps, the last ones
BETWEEN = "between"  # from the end of one step to the start of the next


class PhaseTimes:
    """Observer that times data, forward, backward, optimizer and the time between two steps.

    On a GPU a phase lasts from when the device reaches its start until it reaches the start of the
    next, including gaps in which it waits for the host; `host_ms` is the time in which the host
    issued the phase. Nothing is read before the device has completed it. A phase that occurs more
    than once in a step (accumulation) counts as the sum.

    Cost: 4 us of host time per step on a CPU, and on a GPU one event per phase.
    """

    def __init__(
        self, device: str | torch.device = "cpu", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device, self._clock = torch.device(device), clock
        self._marks: deque[tuple[str, int, float, Any]] = deque()
        self._steps: dict[int, dict[str, list[float]]] = {}  # step: phase: [device ms, host ms]

    def on_phase(self, name: str, step: int) -> None:
        on_gpu = self.device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return  # an event inside a CUDA graph has no time
        event = mark(self.device) if on_gpu else None
        self._marks.append((name, step, self._clock(), event))
        if name == "end" and len(self._marks) > 256:  # a long run keeps no event it can do without
            self._read(wait=False)

    def steps(self) -> list[dict[str, Any]]:
        """One row per step and phase: step, phase, ms, host_ms. Waits for the device."""
        self._read(wait=True)
        return [
            {"step": step, "phase": phase, "ms": ms, "host_ms": host_ms}
            for step, phases in self._steps.items()
            for phase, (ms, host_ms) in phases.items()
        ]

    def table(self) -> list[dict[str, Any]]:
        """One row per phase: phase, median_ms, share of the total time of all phases, host_ms
        (median), steps. Waits for the device."""
        found: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for row in self.steps():
            for times, key in zip(found[row["phase"]], ("ms", "host_ms"), strict=True):
                times.append(row[key])
        total = sum(sum(ms) for ms, _ in found.values()) or 1.0
        return [
            {
                "phase": phase,
                "median_ms": median(ms),
                "share": sum(ms) / total,
                "host_ms": median(host_ms),
                "steps": len(ms),
            }
            for phase, (ms, host_ms) in found.items()
        ]

    def _read(self, wait: bool) -> None:
        if wait and self._marks and self._marks[-1][3] is not None:
            self._marks[-1][3].synchronize()
        while len(self._marks) > 1:
            (name, step, began, start), (_, _, ended, end) = self._marks[0], self._marks[1]
            if end is not None and not end.query():
                return
            self._marks.popleft()
            host_ms = 1e3 * (ended - began)
            phase = BETWEEN if name == "end" else name
            sums = self._steps.setdefault(step, {}).setdefault(phase, [0.0, 0.0])
            sums[0] += host_ms if end is None else start.elapsed_time(end)
            sums[1] += host_ms
            if len(self._steps) > KEPT:
                del self._steps[next(iter(self._steps))]
