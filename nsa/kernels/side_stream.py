"""A second CUDA stream for work that fills the SMs which one kernel's last programs leave idle."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

# Least rows of queries, tokens times heads, at which the GPU and not the host limits speed.
ENOUGH = 2**19


class SideStream:
    """A second stream, or the current one itself if a second is not worthwhile.

    Work enqueued inside `with side:` starts after all previous work of the current stream; after
    `join` the current stream waits for all of it. A second stream fills the SMs that one kernel's
    last programs leave idle. It costs the host up to 0.17 ms for each `with`, so without a CUDA
    graph it is used only for at least ENOUGH rows.

    The caching allocator tracks memory only on the stream that allocated it. So memory allocated on
    the side stream is for that stream only, results are allocated before, and nothing that it reads
    or writes may be freed before `join`.
    """

    def __init__(self, q: Tensor) -> None:
        """Create the stream for queries q [tokens, HQ, D]."""
        self._stream: torch.cuda.Stream | None = None
        self._used = False  # since the last join
        many = q.shape[0] * q.shape[1] >= ENOUGH
        if q.is_cuda and (many or torch.cuda.is_current_stream_capturing()):
            self._current = torch.cuda.current_stream(q.device)
            self._stream = _beside(q.device.index, self._current.cuda_stream)
            self._inside = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        if self._stream is not None:
            self._used = True
            self._stream.wait_stream(self._current)
            self._inside.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._stream is not None:
            self._inside.__exit__(*raised)

    def join(self) -> None:
        """Make the current stream wait for the side stream."""
        if self._stream is not None and self._used:
            self._used = False
            self._current.wait_stream(self._stream)


@cache
def _beside(device: int, stream: int) -> torch.cuda.Stream:
    """Side stream of one stream, so that one thread's capture holds no work of another."""
    # High priority: later work on the first stream waits for it more often than the reverse.
    return torch.cuda.Stream(device, priority=-1)
