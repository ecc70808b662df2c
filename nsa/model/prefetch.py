"""Batches drawn ahead of the step that reads them, in a thread."""

import contextlib
import queue
import threading
import time
from typing import Any

import torch
from torch import Tensor

from nsa.model.data import Batch, Device
from nsa.model.train import Data

_POLL_S = 0.1


class Prefetch:
    """`data`, whose next `depth` batches a thread draws and pins while the step computes.

    Batches are those of `data`, in any order of steps: a step that does not follow the last one
    (a run resumed, an evaluation between) starts over there. Sizes may change too.

    `wait_s` is how long the newest batch was waited for, `waited_s` all of them together and
    `batches` their number. An error of the thread is raised by `batch`, with the thread's
    traceback. `close`, leaving a `with`, or dropping the object ends the thread.

    A CUDA graph is captured beside it in the mode "thread_local": in any other, the thread that
    pins memory would spoil the capture.

    Raises ValueError for a depth below 1.
    """

    def __init__(self, data: Data, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth} must be at least 1: the next batch")
        self.data, self.depth = data, depth
        self.pin = torch.cuda.is_available()  # only a GPU copies from pinned memory
        self.wait_s = self.waited_s = 0.0
        self.batches = 0
        self._drawer: _Drawer | None = None
        self._closed = False

    def batch(self, step: int, batch: int, tokens: int, device: Device = "cpu") -> Batch:
        """`data.batch(...)`, in pinned memory where that serves. ValueError once closed."""
        if self._closed:
            raise ValueError(f"step {step}: this Prefetch was closed; make another")
        started = time.perf_counter()
        wanted = (step, batch, tokens)
        if self._drawer is None or self._drawer.next != wanted:
            self._stop()
            self._drawer = _Drawer(self.data, wanted, self.depth, self.pin)
        try:
            drawn = self._drawer.take()
        except BaseException:
            self._stop()  # so that the step can be tried again
            raise
        self.wait_s = time.perf_counter() - started
        self.waited_s += self.wait_s
        self.batches += 1
        device = torch.device(device)
        if device.type == "cpu":
            return drawn
        tokens_, targets = drawn
        return tokens_.to(device, non_blocking=self.pin), targets.to(device, non_blocking=self.pin)

    def record(self) -> dict[str, Any]:
        """What `data` says of itself, and what its batches were waited for."""
        inner = self.data.record() if hasattr(self.data, "record") else {}
        mean_ms = 1e3 * self.waited_s / self.batches if self.batches else 0.0
        return {**inner, "prefetch": {"depth": self.depth, "mean_wait_ms": mean_ms}}

    def close(self) -> None:
        """Ends the thread, after the batch that it draws just then. May be called twice."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        if self._drawer is not None:
            self._drawer.stop()
            self._drawer = None

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_drawer", None) is not None:
            self._drawer.leave()


class _Drawer:
    """One thread that draws the batches from one step on, in order."""

    def __init__(self, data: Data, first: tuple[int, int, int], depth: int, pin: bool) -> None:
        self.next = first  # (step, batch, tokens) of what `take` returns
        self._drawn: queue.Queue = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._draw, args=(data, first, pin), name="nsa-prefetch", daemon=True
        )
        self._thread.start()

    def take(self) -> tuple[Tensor, Tensor]:
        drawn = self._drawn.get()
        if isinstance(drawn, BaseException):
            drawn.add_note(f"while the batch of step {self.next[0]} was drawn ahead")
            raise drawn
        step, batch, tokens = self.next
        self.next = (step + 1, batch, tokens)
        return drawn

    def leave(self) -> None:
        """Tells the thread to end, and does not wait for it."""
        self._stopped.set()

    def stop(self) -> None:
        """Ends the thread."""
        self.leave()
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._drawn.get_nowait()  # so that it need not wait for room
            self._thread.join(_POLL_S)

    def _draw(self, data: Data, first: tuple[int, int, int], pin: bool) -> None:
        step, batch, tokens = first
        while not self._stopped.is_set():
            try:
                drawn = tuple(data.batch(step, batch, tokens))
                if pin:
                    drawn = tuple(x if x.is_pinned() else x.pin_memory() for x in drawn)
            except BaseException as error:
                self._put(error)
                return
            self._put(drawn)
            step += 1

    def _put(self, item: Any) -> None:
        while not self._stopped.is_set():
            try:
                self._drawn.put(item, timeout=_POLL_S)
                return
            except queue.Full:
                continue
