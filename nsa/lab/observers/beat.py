"""A line at least every ten seconds that says where the training is, whatever else is printed.

The lines come from a thread of their own, so also from inside a step that does not end. The thread
needs the GIL now and then: native code that never gives it up silences it, as it does
`stacks_on_signal`; `py-spy dump --pid` shows where that is.
"""

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import torch
from torch import Tensor

from nsa.lab.measure.recorders import MIB, resident_mib
from nsa.lab.observers.deferred import Deferred

WINDOW = 50  # steps whose median is the pace


class Heartbeat:
    """An observer that tells step, phase, seconds in it, s/step and ETA, at most `every_s` apart.

    Each beat is a line on `out` (None: none) and, with `file`, a JSON object on a line of its own,
    null for what is not known yet. `loss` is the newest one whose copy has arrived: nothing waits
    for it. `mib` is what the GPU's allocator has handed out, or on a CPU what the process holds.
    `detail()`, called from the thread, ends the line with more. A step is where the host is, which
    may be ahead of the GPU.

    Cost: 1 us of the host's time a step, and every few seconds a copy of a loss.
    """

    def __init__(
        self,
        out: TextIO | None = sys.stderr,
        every_s: float = 10.0,
        file: str | os.PathLike | None = None,
        total_steps: int | None = None,
        *,
        rank: int | None = None,
        detail: Callable[[], str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """rank: from the trainer, or torchrun's RANK, or 0. clock: seconds since 1970."""
        if not every_s > 0:
            raise ValueError(f"every_s={every_s} must be greater than 0; 10 is usual")
        self.every_s, self.total_steps, self.detail = every_s, total_steps, detail
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._given_rank, self._out, self._clock = rank is not None, out, clock
        # until close()
        self._file = None if file is None else Path(file).open("a", buffering=1)  # noqa: SIM115
        # step, phase, its start, the step's start: one assignment, for the thread reads it.
        self._place = (None, "before the first step", clock(), None)
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._loss: tuple[int | None, float | None] = (None, None)
        self._losses = Deferred()
        self._device, self._mib = torch.device("cpu"), math.nan
        self._sampled = -math.inf
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def on_start(self, trainer: Any) -> None:
        """Takes the schedule's end, the rank and the device from the trainer; starts the beat."""
        config, parallel = getattr(trainer, "config", None), getattr(trainer, "parallel", None)
        if self.total_steps is None:
            self.total_steps = getattr(config, "steps", None)
        if not self._given_rank and parallel is not None:
            self.rank = parallel.rank
        self._device = torch.device(getattr(trainer, "device", "cpu"))
        self.start()

    def start(self) -> None:
        """Starts the thread, and beats once; nothing happens if it beats already."""
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="nsa:heartbeat", daemon=True)
            self._thread.start()

    def on_phase(self, name: str, step: int) -> None:
        now, before = self._clock(), self._place[3]
        self._place = (step, name, now, now if name == "data" else before)
        if name == "data":
            if before is not None:  # what lies between two steps counts as well
                self._seconds.append(now - before)
            self.start()

    def on_step(self, step: int, loss: Tensor) -> None:
        for (seen, _), value in self._losses.ready():
            self._loss = (seen, float(value))
        now = self._clock()
        if now - self._sampled >= self.every_s / 4 or self._loss[0] is None:
            self._sampled = now
            # Asked here and not by the thread: in a stuck step the allocator may be locked.
            if loss.is_cuda:
                self._mib = torch.cuda.memory_allocated(loss.device) / MIB
            if not len(self._losses):
                self._losses.put((step, now), loss)

    def beat(self) -> dict[str, Any]:
        """Writes one beat and returns it."""
        now = self._clock()
        step, phase, since, began = self._place
        pace = median(seconds) if (seconds := list(self._seconds)) else None
        eta = None
        if pace is not None and self.total_steps is not None:
            eta = max(0.0, pace * (self.total_steps - step) - min(now - began, pace))
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
        """Stops the thread, and beats once more."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            self.beat()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _run(self) -> None:
        while True:
            # Neither a full disk nor a closed terminal nor a detail is a reason to fall silent.
            with contextlib.suppress(Exception):
                self.beat()
            if self._stop.wait(0.9 * self.every_s):
                return


def line(beat: dict[str, Any], total_steps: int | None = None) -> str:
    """The beat for people: 12:00:10 rank 0 · step 7/500 backward 3.2 s · 0.065 s/step · ..."""
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
