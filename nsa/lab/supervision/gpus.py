"""A machine's GPUs, lent to one trial each: beside another one a trial is not trusted."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from nsa.lab.supervision import preflight

Item, Result = TypeVar("Item"), TypeVar("Result")


class Gpus:
    """`with gpus.one() as gpu:` waits until one is free and has it alone.

    gpu is what CUDA_VISIBLE_DEVICES, and `runner.run`, take; None where `names` is empty: what
    needs none waits for nobody.
    """

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.names = tuple(names)
        self._free: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in self.names:
            self._free.put(name)

    @contextmanager
    def one(self) -> Iterator[str | None]:
        if not self.names:
            yield None
            return
        name = self._free.get()
        try:
            yield name
        finally:
            self._free.put(name)

    def map(
        self, function: Callable[[str | None, Item], Result], items: Iterable[Item], workers: int
    ) -> list[Result]:
        """function(gpu, item) of each, in their order: one on each GPU at once, else `workers`."""

        def lent(item: Item) -> Result:
            with self.one() as gpu:
                return function(gpu, item)

        with ThreadPoolExecutor(len(self.names) or workers) as pool:
            return list(pool.map(lent, items))


def only(gpu: str | None) -> dict[str, str]:
    """The variables under which a child process sees this GPU and no other; none for None."""
    return {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}


def all_visible() -> Gpus:
    """Those that this process may use."""
    names = preflight.visible()
    if names is None:
        names = [str(index) for index in range(len(preflight.gpus("name")))]
    return Gpus(tuple(names))
