"""How far a device has come along the work that a training gave it."""

from collections import deque

import torch

MOST_EVENTS = 4096  # under way on a device


class DeviceEvents:
    """CUDA events recorded along the work: those that the device has passed are progress.

    The thread that asks keeps the training from the GIL for a moment with every event that it looks
    at or lets go, so it looks at few, and events are used again.
    """

    def __init__(self) -> None:
        self.quiet = False
        self._waiting: deque[tuple[int, torch.cuda.Event]] = deque()  # with their device
        self._spare: dict[int, list[torch.cuda.Event]] = {}

    def record(self) -> bool:
        """Marks this place of the current stream; False while that is not possible."""
        if self.quiet or len(self._waiting) >= MOST_EVENTS:
            return False
        if torch.cuda.is_current_stream_capturing():
            return False
        device = torch.cuda.current_device()
        try:  # several threads record, so nobody looks first whether there is one
            event = self._spare[device].pop()
        except (KeyError, IndexError):
            event = torch.cuda.Event()
        event.record()
        self._waiting.append((device, event))
        return True

    def passed(self) -> int:
        """How many the device has passed since it was asked last, by halves: it keeps the order.

        Of several streams some events may count before their own has come that far.
        """
        waiting, first, last = self._waiting, 0, len(self._waiting)
        while first < last and not self.quiet:
            middle = (first + last) // 2
            if waiting[middle][1].query():
                first = middle + 1
            else:
                last = middle
        for _ in range(first):
            device, event = waiting.popleft()
            self._spare.setdefault(device, []).append(event)
        return first
