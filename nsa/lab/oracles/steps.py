"""Around the steps of a training: its backwards, its optimizer, checkpoints, steady slopes.

Does a series grow steadily? A least-squares line calls one late allocation a leak. Of the slopes
between all pairs of points (Theil and Sen) most are 0 then, and the low ones stay so.

A least-squares line calls one late allocation a leak. Of the slopes between all pairs of points
most are 0 then, and the low ones stay so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def counted() -> Iterator[list[int]]:
    """A list that gets an item for each checkpoint that the code inside makes."""
    calls: list[int] = []
    with _replaced(
        lambda plain: lambda *a, **k: (calls.append(1), plain(*a, **k))[1],
        lambda plain: _Counting(plain, calls),
    ):
        yield calls


@contextmanager
def switched_off() -> Iterator[bool]:
    """Checkpoints inside are plain calls; yields whether this torch allows it."""

    def straight(*args: Any, **options: Any) -> Iterator[None]:
        yield  # the caller runs the function between this and the end

    with _replaced(lambda plain: straight, lambda plain: _Straight) as could:
        yield could


class _Straight:
    """In place of the function that a reentrant checkpoint applies."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


class _Counting:
    def __init__(self, plain: Any, calls: list[int]) -> None:
        self._plain, self._calls = plain, calls

    def apply(self, *args: Any) -> Any:
        self._calls.append(1)
        return self._plain.apply(*args)


@contextmanager
def _replaced(generator: Callable[[Any], Any], function: Callable[[Any], Any]) -> Iterator[bool]:
    """torch.utils.checkpoint's two ways, which it looks up by name in each call."""
    from torch.utils import checkpoint

    made = {"_checkpoint_without_reentrant_generator": generator, "CheckpointFunction": function}
    plain = {name: getattr(checkpoint, name, None) for name in made}
    if None in plain.values():
        yield False
        return
    try:
        for name, make in made.items():
            setattr(checkpoint, name, make(plain[name]))
        yield True
    finally:
        for name, before in plain.items():
            setattr(checkpoint, name, before)


LOW = 0.2  # the quantile of the slopes that must be positive
LEAST = 4  # points that must be left
MOST = 64


def skip_first_third(values: Sequence[float]) -> Sequence[float]:
    """Without what warms up."""
    return values[len(values) // 3 :]


def steady_slope(steps: Sequence[float], values: Sequence[float]) -> float | None:
    """The slope that four fifths of all pairs of points reach, the first third left out.

    Units of `values` a step; 0 or less for what stays, falls, goes to and fro, or jumps once. None
    for fewer than 4 points after the first third.

    Raises ValueError for steps and values of different numbers.
    """
    if len(steps) != len(values):
        raise ValueError(f"{len(steps)} steps with {len(values)} values; each step needs one")
    x = np.asarray(skip_first_third(steps), dtype=float)
    y = np.asarray(skip_first_third(values), dtype=float)
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < LEAST:
        return None
    if len(x) > MOST:
        chosen = np.linspace(0, len(x) - 1, MOST).round().astype(int)
        x, y = x[chosen], y[chosen]
    first, second = np.triu_indices(len(x), k=1)
    return float(np.quantile((y[second] - y[first]) / (x[second] - x[first]), LOW))


def exponent(small: float, middle: float, large: float) -> float | None:
    """Of a quantity at n, 2 n and 4 n, whatever constant it has besides: 1 linear, 2 quadratic.

    None where it does not grow.
    """
    near, far = middle - small, large - middle
    return float(np.log2(far / near)) if near > 0 and far > 0 else None


Result = dict[str, Any]


class Steps:
    """Tells its listeners of begin(step), backward(roots), optimizer(optimizer), end(step, loss).

    Backwards and optimizers are found wherever this process calls them: a stranger's step function
    needs no word of it. Listeners may leave out what they do not need.
    """

    def __init__(self, listeners: Iterable[Any]) -> None:
        self._listeners = list(listeners)
        self._step: int | None = None
        self._undo: list[Callable[[], Any]] = []

    def open(self) -> None:
        """From now on."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        plain = torch.autograd.backward  # what Tensor.backward calls as well

        def watched(tensors: Any, *args: Any, **options: Any) -> Any:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            if self._step is not None and not torch.compiler.is_compiling():
                self._tell("backward", roots)
            return plain(tensors, *args, **options)

        def restore() -> None:
            if torch.autograd.backward is watched:
                torch.autograd.backward = plain

        torch.autograd.backward = watched
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._optimizer(optimizer))
        self._undo = [restore, hook.remove]

    def close(self) -> None:
        """Takes every hook away."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        for listener in self._listeners:
            if hasattr(listener, "close"):
                listener.close()

    def begin(self, step: int) -> None:
        self._step = step
        self._tell("begin", step)

    def end(self, step: int, loss: Any) -> None:
        self._step = None
        self._tell("end", step, loss)

    def _optimizer(self, optimizer: Any) -> None:
        if self._step is not None:
            self._tell("optimizer", optimizer)

    def _tell(self, what: str, *about: Any) -> None:
        for listener in self._listeners:
            method = getattr(listener, what, None)
            if method is not None:
                method(*about)


def ok(detail: str) -> Result:
    return {"ok": True, "detail": detail, "what": "", "place": ""}


def unknown(detail: str) -> Result:
    """It could not tell; that is no failure."""
    return {"ok": None, "detail": detail, "what": "", "place": ""}


def broken(what: str, detail: str, place: str = "") -> Result:
    return {"ok": False, "detail": detail, "what": what, "place": place}


def any_layer(name: str) -> str:
    """blocks.1.mlp.weight -> blocks.*.mlp.weight: the same fault in a model of other depth."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def some(names: Iterable[str], most: int = 4) -> str:
    """The first few of them."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def device_of(model: nn.Module | None) -> torch.device:
    """A GPU where the model has a parameter on one."""
    devices = {p.device for p in model.parameters()} if model is not None else set()
    return next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
