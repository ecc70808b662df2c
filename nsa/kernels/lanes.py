"""Kernels beside each other: a second stream for what nobody on the first waits for."""

from functools import cache
from types import TracebackType

import torch
from torch import Tensor

# Rows of queries, tokens times heads, from which on the GPU and not the host is what takes time.
ENOUGH = 2**19


class Lane:
    """A stream beside the current one; it is the current one itself where a second does not pay.

    Work enqueued inside `with lane:` begins after all that the current stream had been given by
    then; after `join` the current stream waits for all of it. A second stream fills the processors
    that one kernel's last programs leave idle. It costs the host up to 0.17 ms for each `with`, so
    without a CUDA graph it is taken from ENOUGH rows on.

    The caching allocator knows the use of memory on the stream that it was allocated on and on no
    other. So what is allocated in a lane is for the lane alone, results are allocated before, and
    nothing that a lane reads or writes may be freed before `join`.
    """

    def __init__(self, q: Tensor) -> None:
        """For queries q [tokens, HQ, D]."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._stream is not None:
            self._inside.__exit__(kind, error, trace)

    def join(self) -> None:
        """Makes the current stream wait for the lane."""
        if self._stream is not None and self._used:
            self._used = False
            self._current.wait_stream(self._stream)


@cache
def _beside(device: int, stream: int) -> torch.cuda.Stream:
    """The lane of a stream: its own, so that what one thread captures holds nothing of another."""
    # Of high priority: what follows on the first stream waits for it more often than it does.
    return torch.cuda.Stream(device, priority=-1)
