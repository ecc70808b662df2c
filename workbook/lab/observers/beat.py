"""Print the position of a training at least every ten seconds, whatever else is printed.

The lines come from a separate thread, so they continue during a step that does not end. The thread
needs the GIL briefly: native code that never releases it silences the thread, as it does
`stacks_on_signal`; `py-spy dump --pid` shows where that is.
"""

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from workbook.lab.measure.recorders import MIB, resident_mib
from workbook.lab.measure.timing import mark
from workbook.lab.observers.deferred import Deferred
from workbook.lab.observers.watchdog import STEPS, Beside

FIRST_MARKS = 4  # of a GPU's clock, in consecutive steps; later ones are spaced out


class Heartbeat(Beside):
    """Observer that reports step, phase, seconds in it, s/step and ETA, at most `every_s` apart.

    Each beat is a line on `out` (None: none) and, with `file`, a JSON object on its own line, with
    null for unknown values. `loss` is the newest one whose copy has arrived: nothing waits for it.
    `mib` is the memory allocated by torch on the GPU, or on a CPU the process's resident memory.
    `detail()`, called from the thread, adds text to the line. The step is the host's, which may be
    ahead of the GPU; s/step and ETA are the GPU's own, from events recorded after losses that have
    arrived, and null until two have. On a CPU they are the host's.

    Cost: 1 us of host time per step, and every few seconds a copy of a loss and an event.
    """

    def __init__(
        self,
        out: TextIO | None = sys.stderr,
        every_s: float = 10.0,
        file: str | os.PathLike | None = None,
        total_steps: int | None = None,
        *,
        detail: Callable[[], str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """clock: seconds since 1970. The rank is the trainer's, or torchrun's RANK, or 0."""
        if not every_s > 0:
            raise ValueError(f"every_s={every_s} must be greater than 0; 10 is usual")
        super().__init__("nsa:heartbeat", 0.9 * every_s, clock)
        self.every_s, self.total_steps, self.detail = every_s, total_steps, detail
        self.rank, self._out = int(os.environ.get("RANK", "0")), out
        # until close()
        self._file = None if file is None else Path(file).open("a", buffering=1)  # noqa: SIM115
        self._loss: tuple[int | None, float | None] = (None, None)
        self._losses = Deferred()
        self._marks, self._on_gpu = DeviceMarks(clock), False
        self._device, self._mib = torch.device("cpu"), math.nan
        self._sampled = -math.inf

    def on_start(self, trainer: Any) -> None:
        """Read the schedule's end, the rank and the device from the trainer; start the beat."""
        config, parallel = getattr(trainer, "config", None), getattr(trainer, "parallel", None)
        if self.total_steps is None:
            self.total_steps = getattr(config, "steps", None)
        if parallel is not None:
            self.rank = parallel.rank
        self._device = torch.device(getattr(trainer, "device", "cpu"))
        self.start()

    def on_phase(self, name: str, step: int) -> None:
        super().on_phase(name, step)
        if name == "data":
            self.start()

    def on_step(self, step: int, loss: Tensor) -> None:
        for (seen, event), value in self._losses.ready():
            self._loss = (seen, float(value))
            if event is not None:
                self._marks.arrived(seen, event)
        self._on_gpu, now = loss.is_cuda, self._clock()
        few = self._marks.count < FIRST_MARKS if loss.is_cuda else self._loss[0] is None
        if few or now - self._sampled >= self.every_s / 4:
            self._sampled = now
            # Read here and not by the thread: in a stuck step the allocator may be locked.
            if loss.is_cuda:
                self._mib = torch.cuda.memory_allocated(loss.device) / MIB
            if not len(self._losses):
                # a timed event, recorded after the work that computes the loss
                self._losses.put((step, mark(loss.device) if loss.is_cuda else None), loss)

    def beat(self) -> dict[str, Any]:
        """Write one beat and return it."""
        now = self._clock()
        step, phase, since, began = self._place
        if self._on_gpu:  # whose steps may be much longer than the host's
            pace, done, at = self._marks.pace or (None, step, began)
        else:
            pace = median(seconds) if (seconds := list(self._seconds)) else None
            done, at = step, began
        eta = None
        if pace is not None and self.total_steps is not None:
            # assume that the steps begun since `at` took the median time
            spent = min(now - at, pace * (step + 1 - done))
            eta = max(0.0, pace * (self.total_steps - done) - spent)
        mib = self._mib if self._device.type == "cuda" else resident_mib()
        loss_step, loss = self._loss
        beat = {
            "ts": round(now, 3),
            "iso": datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
            "pid": os.getpid(),
            "rank": self.rank,
            "step": step,
            "phase": phase,
            "phase_s": round(now - since, 3),
            "s_per_step": pace,
            "eta_s": eta,
            "loss": loss,
            "loss_step": loss_step,
            "mib": None if math.isnan(mib) else mib,
        }
        if self._file is not None:
            self._file.write(json.dumps(beat) + "\n")
        if self._out is not None:
            more = f" · {self.detail()}" if self.detail is not None else ""
            self._out.write(line(beat, self.total_steps) + more + "\n")
            self._out.flush()
        return beat

    def close(self) -> None:
        """Stop the thread, and beat once more."""
        if self._thread is not None:
            super().close()
            self.beat()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _look(self) -> None:
        self.beat()


class DeviceMarks:
    """Ends of a few steps on the device's clock. An event is read once its loss has arrived, so
    nothing waits, and the delay until then does not matter.

    `pace` is (s/step, number of steps that have surely ended, host time of that end), or None
    before two marks. s/step is the median over steps, each counted with the mean of its stretch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self.count = clock, 0
        self._last: tuple[int, Any] | None = None
        self._stretches: deque[tuple[float, int]] = deque(maxlen=STEPS)  # (s/step, steps)
        # The device's seconds since the first mark, and the host's clock when they were 0: the
        # earliest estimate, since an event is noticed when it happens or later.
        self._device_s, self._zero = 0.0, math.inf
        self.pace: tuple[float, int, float] | None = None  # one assignment, for the thread

    def arrived(self, step: int, event: Any) -> None:
        """Add the event of that step, which has happened; call in step order."""
        self.count += 1
        if self._last is not None:
            before, earlier = self._last
            seconds = earlier.elapsed_time(event) / 1e3
            self._device_s += seconds
            self._stretches.append((seconds / (step - before), step - before))
        self._last = step, event
        self._zero = min(self._zero, self._clock() - self._device_s)
        if self._stretches:
            seconds, steps = zip(*self._stretches, strict=True)
            pace = np.quantile(seconds, 0.5, weights=steps, method="inverted_cdf")
            self.pace = float(pace), step + 1, self._zero + self._device_s


def line(beat: dict[str, Any], total_steps: int | None = None) -> str:
    """Format a beat: 12:00:10 rank 0 · step 7/500 backward 3.2 s · 0.065 s/step · ..."""
    of = "" if total_steps is None else f"/{total_steps}"
    where = "" if beat["step"] is None else f"step {beat['step']}{of} "
    parts = [f"{where}{beat['phase']} {beat['phase_s']:.1f} s"]
    if beat["s_per_step"] is not None:
        parts.append(f"{beat['s_per_step']:.3g} s/step")
    if beat["eta_s"] is not None:
        parts.append(f"ETA {timedelta(seconds=round(beat['eta_s']))}")
    if beat["loss"] is not None:
        parts.append(f"loss {beat['loss']:.4f} (step {beat['loss_step']})")
    if beat["mib"] is not None:
        parts.append(f"{beat['mib']:.0f} MiB")
    return f"{beat['iso'][11:19]} rank {beat['rank']} · " + " · ".join(parts)
