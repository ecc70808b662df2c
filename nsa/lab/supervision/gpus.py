"""A machine's GPUs, lent to one trial each: beside another one a trial is not trusted."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager

from nsa.lab.supervision import preflight


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

    @property
    def at_once(self) -> int:
        """How many can have one at a time; 1 where none can be told apart."""
        return len(self.names) or 1

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


def only(gpu: str | None) -> dict[str, str]:
    """The variables under which a child process sees this GPU and no other; none for None."""
    return {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}


def all_visible() -> Gpus:
    """Those that this process may use."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        return Gpus(tuple(str(index) for index in range(len(preflight.gpus("name")))))
    return Gpus(tuple(name.strip() for name in told.split(",") if name.strip()))
