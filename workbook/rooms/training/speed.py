"""Speed of a training job, measured without its first steps and without profiled steps.

Each stretch of steps is timed from idle to idle, without the work between stretches (evaluation,
checkpoints).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nsa.model.data import Prefetch, spread_ms
from nsa.model.train import Trainer

LEFT_OUT = 20  # steps at the start of a process: compile, capture of a graph, tuning, warm-up
NOTICED = 0.01  # fraction of a step above which waiting for data is printed


class Speed:
    """Time the stretches of a job that starts at the trainer's current step.

    A run must end at each of `borders`. `profiled` steps do not count either: profiling slows
    them down.
    """

    def __init__(
        self,
        trainer: Trainer,
        data: Prefetch,
        profiled: range = range(0),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._trainer, self._data, self._profiled, self._clock = trainer, data, profiled, clock
        self.first = trainer.steps_done
        self._stretches: list[tuple[range, float, range]] = []  # steps, seconds, batches

    def borders(self, now: int) -> list[int]:
        """Steps after `now` before which a run must end."""
        profiled = [self._profiled.start, self._profiled.stop] if self._profiled else []
        return [step for step in (self.first + LEFT_OUT, *profiled) if step > now]

    @contextmanager
    def stretch(self) -> Iterator[None]:
        """Context that times a run of steps, at whose end the device is synchronized."""
        step, batch, began = self._trainer.steps_done, self._data.batches, self._clock()
        yield
        seconds = self._clock() - began
        steps = range(step, self._trainer.steps_done)
        self._stretches.append((steps, seconds, range(batch, self._data.batches)))

    def result(self) -> dict[str, Any]:
        """Return {"tokens_per_s", None if no step counts, "timed_steps", "timed_s", "speed" and
        "loader", both in words or None, and "waits"}: see `_loader`."""
        counted = [
            stretch
            for stretch in self._stretches
            if stretch[0].start >= self.first + LEFT_OUT and stretch[0].start not in self._profiled
        ]
        steps, seconds = sum(len(s) for s, *_ in counted), sum(s for _, s, _ in counted)
        config, end = self._trainer.config, self._trainer.steps_done
        speed = config.batch * config.tokens * steps / seconds if steps else None
        left_out = f"the first {LEFT_OUT} (compile, capture, warm-up)"
        also = ""
        if self._profiled:
            also = f" and steps {self._profiled.start + 1} to {self._profiled.stop} (profiled)"
        if speed is None:
            words = f"not measured: steps {self.first + 1} to {end} are all among {left_out}{also}"
        else:
            first = counted[0][0].start + 1
            words = f"{speed:,.0f} tokens/s over steps {first} to {end}, without {left_out}{also}"
        return {
            "tokens_per_s": speed,
            "timed_steps": steps,
            "timed_s": seconds,
            "speed": words,
            **self._loader(counted or self._stretches),
        }

    def _loader(self, stretches: list[tuple[range, float, range]]) -> dict[str, Any]:
        """Return "waits" for these steps' batches, except the job's first, never prefetched:
        p50_ms, p95_ms, max_ms, and their share of the steps' time; and "loader", the same in words
        if the share exceeds NOTICED."""
        batches = [self._data.waits_s[i] for *_, drawn in stretches for i in drawn if i > 0]
        seconds = sum(s for _, s, _ in stretches)
        if not batches or not seconds:
            return {"waits": {}, "loader": None}
        waits = {f"{name}_ms": ms for name, ms in spread_ms(batches).items()}
        share = sum(batches) / seconds
        words = None
        if share > NOTICED:
            p50, p95, most = (f"{waits[f'{name}_ms']:.3g}" for name in ("p50", "p95", "max"))
            words = f"waited for: p50 {p50} ms, p95 {p95} ms, max {most} ms, {share:.1%} of a step"
        return {"waits": {**waits, "share": share}, "loader": words}
