"""Oracle of steps that take longer and longer: a list that is searched, a cache that is copied.

It measures the process's processor time rather than wall time, so a busy machine causes no growth.
Waits for other processes, for a disk or the network are not included.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from workbook.lab.oracles.growth import Series, skip_first_third
from workbook.lab.oracles.steps import Result, broken, device_of, ok, unknown

LEAST = 18  # steps: 12 remain after the first third, and 12 random values do not grow so steadily
LARGE, SOME = 0.3, 0.1  # growth in the last two thirds, relative to a step in the middle of the run
LEAST_S = 1e-3  # total growth: less does not matter


class Duration(Series):
    """Processor seconds of each step, all threads; includes the host's wait for a GPU.

    If steps grow because the model's inputs grow, the result is a hint, not a fault.
    """

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__()
        self._device = device_of(model)
        self._hook = model and model.register_forward_pre_hook(self._given, with_kwargs=True)

    def begin(self, step: int) -> None:
        self._items, self._looking = 0, self.wants(step)
        if self._looking:
            self._began = self._used()

    def end(self, step: int, loss: Any) -> None:
        if self._looking:
            self.put(step, self._used() - self._began, self._items)

    def close(self) -> None:
        if self._hook:
            self._hook.remove()

    def result(self) -> Result:
        seconds = self.column()
        slope, late = self.slope(), skip_first_third(list(self.rows))
        if slope is None or len(seconds) < LEAST:
            return unknown(f"too few steps to tell growth from noise: {len(seconds)} of {LEAST}")
        middle = float(np.median(skip_first_third(seconds)[: len(late) // 2]))
        grown = slope * (late[-1] - late[0])
        share = grown / middle if middle > 0 else 0.0
        first, last = 1e3 * middle, 1e3 * float(np.median(seconds[-max(3, len(seconds) // 10) :]))
        told = (
            f"{first:,.1f} ms in the middle and {last:,.1f} ms at the end of {late[-1] + 1} steps"
        )
        if share < SOME or grown < LEAST_S:
            return ok(f"a step takes no more processor time from step to step: {told}")
        said = f"a step takes {1e3 * slope:,.2g} ms of processor time more than the last: {told}"
        if (self.slope(1) or 0) > 0:
            return ok(told) | {"hint": f"{said}; so does what the model is given"}
        if share < LARGE:
            return ok(told) | {"hint": said}
        return broken("growing", said)

    def _used(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.process_time()

    def _given(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._items += _items((args, kwargs))


def _items(given: Any) -> int:
    if isinstance(given, torch.Tensor):
        return given.numel()
    if isinstance(given, Mapping):
        given = given.values()
    elif not isinstance(given, list | tuple):
        return 0
    return sum(_items(each) for each in given)
