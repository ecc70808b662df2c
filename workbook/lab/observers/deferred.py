"""Sampling of the steps that an observer records, and device values read without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line reads SAMPLED, and loads no torch for its help
    import torch
    from torch import Tensor

SAMPLED = 10  # distance of observed steps in a long run, where observing all would be costly


class Sampled:
    """Observer of some steps: one `record(number)` for each, and hooks that exist only in those.

    It observes the first step that it is called for, also in a resumed training, and every
    `every`-th step after it; the last `keep` records are kept.
    """

    _attach: Callable[[], list[Any]]  # sets the hooks and returns their handles

    def __init__(self, record: Callable[[int], Any], every: int, keep: int) -> None:
        if every < 1 or keep < 1:
            raise ValueError(f"every={every} and keep={keep} must be at least 1")
        self._record, self._every = record, every
        self._first: int | None = None
        self._steps: deque[Any] = deque(maxlen=keep)
        self._now: Any = None  # the record of a step that is observed
        self._hooks: list[Any] = []

    def on_phase(self, name: str, step: int) -> None:
        if name == "data":
            self._first = step if self._first is None else self._first
            self._now = None if (step - self._first) % self._every else self._record(step)
            if self._now is not None:
                self._steps.append(self._now)
                self._hooks = self._hooks or self._attach()
        elif name == "end" and self._now is not None:
            self._now = None
            if self._every > 1:
                Sampled.close(self)

    def close(self) -> None:
        """Remove every hook from the model; rows stay readable."""
        while self._hooks:
            self._hooks.pop().remove()

    def _kept(self, number: int | None) -> Any:
        """Record of that step, by default the last. Raises ValueError if it was not kept."""
        kept = {record.number: record for record in self._steps}
        if not kept:
            raise ValueError("no step was observed yet; the trainer must have this as an observer")
        if number is not None and number not in kept:
            raise ValueError(f"step {number} was not kept; kept are {', '.join(map(str, kept))}")
        return self._steps[-1] if number is None else kept[number]


class Deferred:
    """Pending copies to the host, in the order in which they were put.

    On a GPU a copy to pinned memory is enqueued after the work that computes the tensor, followed
    by an event: about 20 us of host time each. On a CPU the values are ready at once.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Any, Tensor, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, key: Any, x: Tensor) -> None:
        """Start the copy of x as it is now; `key` is returned with it."""
        x = x.detach()
        if not x.is_cuda:
            self._waiting.append((key, x.clone(), None))
            return
        import torch

        event = torch.cuda.Event()
        host = x.to("cpu", non_blocking=True)  # into pinned memory
        event.record(torch.cuda.current_stream(x.device))
        self._waiting.append((key, host, event))

    def ready(self) -> Iterator[tuple[Any, Tensor]]:
        """Copies that have arrived, up to the first that has not."""
        while self._waiting and (self._waiting[0][2] is None or self._waiting[0][2].query()):
            yield self._waiting.popleft()[:2]

    def all(self, but: int = 0) -> Iterator[tuple[Any, Tensor]]:
        """Every copy except the last `but`. Waits for the device."""
        while len(self._waiting) > but:
            key, host, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            yield key, host
