"""torch.utils.checkpoint counted, or switched off, whoever calls it and however it was imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
