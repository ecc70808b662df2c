"""Detect the steps of a training that does not report them, and its waits for data, and limit the
cost of counting to a two-hundredth of its time.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from whyhung.watch.counting import Undo, in_place_of, raise_on
from whyhung.watch.evidence import PHASES
from whyhung.watch.layout import BEGAN_NS, MAIN_THREAD, MODULES, PHASE, STEP

if TYPE_CHECKING:
    from whyhung.watch.progress import Progress

OTHERS = 64  # steps of other optimizers without one of the first, after which it is replaced
MODULE_S, BACKWARD_S = 5e-6, 400e-6  # approximate cost of counting one, in a step of 20 ms
SHARE = 0.005  # of the time may be spent on counting modules and backwards
MOST_REST_S, TRIES_S = 3.0, 0.1


class Pace:
    """Enable counting of modules and backwards all the time or, if steps are short, at intervals.

    Called with each beat, by the beating thread. If counting in a beat cost more than its share,
    it is off until the average is right, at most three seconds, and then on for a tenth of a
    second; steps always count.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._last, self._seen, self._until = time.monotonic(), (0, 0), 0.0

    def __call__(self) -> float | None:
        progress, now = self._progress, time.monotonic()
        seen = (progress.passed + progress.cells[MODULES], progress.backwards)
        cost_s = MODULE_S * (seen[0] - self._seen[0]) + BACKWARD_S * (seen[1] - self._seen[1])
        spent_s, self._last, self._seen = now - self._last, now, seen
        if not progress.fine:
            progress.fine = now >= self._until
            return TRIES_S if progress.fine else None
        if cost_s > 2 * SHARE * spent_s:
            progress.fine, self._until = False, now + min(cost_s / SHARE, MOST_REST_S)
        return None


def of_optimizers(progress: Progress) -> list[Undo]:
    """Count each step of the first optimizer as a step; the first begins at the first backward."""
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import optimizer

    first = _First(progress)

    def scaling(plain: Callable[..., Any]) -> Callable[..., Any]:
        def counted(scaler: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
            before = first.calls
            try:
                result = plain(scaler, optimizer, *args, **options)
            except BaseException as error:
                raise_on(error)
                raise
            if first.calls == before and not counted.over:  # its gradients overflowed
                first.stepped(optimizer)
            return result

        return counted

    ended = optimizer.register_optimizer_step_post_hook(first.stepped)
    return [
        ended.remove,
        at_first_backward(lambda: _begin(progress)),
        in_place_of(GradScaler, "step", scaling),
    ]


def _begin(progress: Progress) -> None:
    cells = progress.cells
    cells[STEP] = max(0, cells[STEP])
    cells[BEGAN_NS] = cells[BEGAN_NS] or time.monotonic_ns()


class _First:
    """First optimizer that steps: of a GAN's two, one counts."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._others, self.calls = progress, 0, 0
        self._optimizer: Callable[[], Any] = lambda: None

    def stepped(self, optimizer: Any, *_: Any) -> None:
        self.calls += 1
        first = self._optimizer()
        if first is None or self._others >= OTHERS:
            self._optimizer, first = weakref.ref(optimizer), optimizer
        if optimizer is not first:
            self._others += 1
            return
        self._others = 0
        _begin(self._progress)
        number = self._progress.cells[STEP] + 1
        if self._progress.firing:  # inside a backward, whose counts must not restart
            self._progress.cells[STEP] = number
        else:
            self._progress.step(number)


def at_first_backward(do: Callable[[], Any]) -> Undo:
    """Call `do` before the next backward() of this process, and never again."""

    def counting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def first(*args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():
                return plain(*args, **options)
            try:
                if not first.over:
                    undo()
                    do()
                return plain(*args, **options)
            except BaseException as error:
                raise_on(error)
                raise

        return first

    undo = in_place_of(torch.autograd, "backward", counting)
    return undo


def waits_for_data(progress: Progress) -> list[Undo]:
    """Guess the phase "data" while the main thread waits for a DataLoader."""
    from torch.utils.data import dataloader

    def counting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def counted(iterator: Any) -> Any:
            told = not counted.over and threading.get_ident() == progress.cells[MAIN_THREAD]
            before = PHASES[progress.cells[PHASE]]
            if told:
                progress.guess("data")
            try:
                return plain(iterator)
            except BaseException as error:
                raise_on(error)
                raise
            finally:
                if told:
                    progress.guess("other" if before in ("start", "data") else before)

        return counted

    return [in_place_of(dataloader._BaseDataLoaderIter, "__next__", counting)]
