"""A machine's GPUs, lent to one trial each: a trial that shares its GPU is not trusted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Lock

from whyhung.process import preflight


class Gpus:
    """Pool of exclusive GPUs: `with gpus.one() as gpu:` waits for one, first come, first served.

    gpu is a value for CUDA_VISIBLE_DEVICES and `runner.run`; None, without waiting, if `names` is
    empty. A name that occurs n times is lent to n trials at a time, which share it.
    """

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.names = tuple(names)
        self._lock = Lock()
        self._free = deque(self.names)
        self._waiting: deque[Future[str]] = deque()

    @contextmanager
    def one(self) -> Iterator[str | None]:
        if not self.names:
            yield None
            return
        name = self._take()
        try:
            yield name
        finally:
            self._give(name)

    def _take(self) -> str:
        with self._lock:
            if self._free:
                return self._free.popleft()
            turn: Future[str] = Future()
            self._waiting.append(turn)
        try:
            return turn.result()
        except BaseException:  # interrupted: a GPU that it has just got is for the next
            if not turn.cancel():
                self._give(turn.result())
            raise

    def _give(self, name: str) -> None:
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(name)
                    return
            self._free.append(name)


def only(gpu: str | None) -> dict[str, str]:
    """Return variables under which a child process sees this GPU only; empty for None."""
    return {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}


def all_visible() -> Gpus:
    """Return the GPUs that this process may use."""
    names = preflight.visible()
    if names is None:
        names = [str(index) for index in range(len(preflight.gpus("name")))]
    return Gpus(tuple(names))
