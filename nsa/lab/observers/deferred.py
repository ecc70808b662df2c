"""Which steps an observer looks at, and numbers read from the device without waiting for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line reads SAMPLED, and loads no torch for its help
    import torch
    from torch import Tensor

SAMPLED = 10  # steps from one to the next in a long run, where looking at all would be paid for


class Sampled:
    """Whether a step is looked at: the first asked about, and each a multiple of `every` later.

    A training that is resumed between two of them is looked at from its own first step.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._first: int | None = None

    def __call__(self, step: int) -> bool:
        if self._first is None:
            self._first = step
        return (step - self._first) % self.every == 0


def kept_step(steps: Sequence[Any], number: int | None) -> Any:
    """The record with that `.number`, by default the last; ValueError if it was not kept."""
    kept = {record.number: record for record in steps}
    if not kept:
        raise ValueError("no step was observed yet; the trainer must have this as an observer")
    if number is not None and number not in kept:
        raise ValueError(f"step {number} was not kept; kept are {', '.join(map(str, kept))}")
    return steps[-1] if number is None else kept[number]


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

    def all(self) -> Iterator[tuple[Any, Tensor]]:
        """Every one of them. Waits for the device."""
        while self._waiting:
            key, host, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            yield key, host
