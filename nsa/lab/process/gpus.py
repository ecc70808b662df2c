"""A machine's GPUs, lent to one trial each: beside another one a trial is not trusted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event, Lock
from typing import TypeVar

from nsa.lab.process import preflight

Item, Result = TypeVar("Item"), TypeVar("Result")


class Gpus:
    """`with gpus.one() as gpu:` waits until one is free and has it alone; who asked first is first.

    gpu is what CUDA_VISIBLE_DEVICES, and `runner.run`, take; None where `names` is empty: what
    needs none waits for nobody. A name that stands there n times is lent to n, who share it.
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
        except BaseException:  # interrupted: what it gets now, or has just got, is for the next
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

    def map(
        self,
        function: Callable[[str | None, Item], Result],
        items: Iterable[Item],
        workers: int = 1,
        *,
        stop: Event | None = None,
    ) -> list[Result]:
        """function(gpu, item) of each, in their order: one on each GPU at once, else `workers`.

        stop: set when the caller is interrupted or one of them raises, for the others in flight.
        """
        stop = stop or Event()

        def lent(item: Item) -> Result:
            with self.one() as gpu:
                try:
                    return function(gpu, item)
                except BaseException:
                    stop.set()
                    raise

        with ThreadPoolExecutor(len(self.names) or workers) as pool:
            each = [pool.submit(lent, item) for item in items]
            try:
                for ended in wait(each, return_when=FIRST_EXCEPTION).done:
                    ended.result()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [ended.result() for ended in each]


def only(gpu: str | None) -> dict[str, str]:
    """The variables under which a child process sees this GPU and no other; none for None."""
    return {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}


def all_visible() -> Gpus:
    """Those that this process may use."""
    names = preflight.visible()
    if names is None:
        names = [str(index) for index in range(len(preflight.gpus("name")))]
    return Gpus(tuple(names))
