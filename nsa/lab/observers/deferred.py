"""Which steps an observer looks at, and numbers read from the device without waiting for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line reads SAMPLED, and loads no torch for its help
    import torch
    from torch import Tensor

SAMPLED = 10  # steps from one to the next in a long run, where looking at all would be paid for


class Sampled:
    """An observer of some steps: of each a `record(number)`, and hooks that exist in those only.

    Observed are the first step asked about, also of a training that is resumed, and each that is a
    multiple of `every` steps after it; the last `keep` records are kept.
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
        """Takes every hook off the model; rows stay readable."""
        while self._hooks:
            self._hooks.pop().remove()

    def _kept(self, number: int | None) -> Any:
        """The record of that step, by default the last; ValueError if it was not kept."""
        kept = {record.number: record for record in self._steps}
        if not kept:
            raise ValueError("no step was observed yet; the trainer must have this as an observer")
        if number is not None and number not in kept:
            raise ValueError(f"step {number} was not kept; kept are {', '.join(map(str, kept))}")
        return self._steps[-1] if number is None else kept[number]


class Deferred:
    """Copies on their way to the host, in the order in which they were put.

    On a GPU a copy goes to pinned memory behind the work that makes the tensor, with an event
    behind it: about 20 us of the host's time each. On a CPU the values are there at once.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Any, Tensor, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, key: Any, x: Tensor) -> None:
        """Starts the copy of x as it is now; `key` comes back with it."""
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
        """Those that have arrived, as far as nothing before them is still missing."""
        while self._waiting and (self._waiting[0][2] is None or self._waiting[0][2].query()):
            yield self._waiting.popleft()[:2]

    def all(self, but: int = 0) -> Iterator[tuple[Any, Tensor]]:
        """Every one of them, but for the last few. Waits for the device."""
        while len(self._waiting) > but:
            key, host, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            yield key, host
