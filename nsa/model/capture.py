"""Steps replayed from a CUDA graph, in training and in generation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Launch work inside on `stream`, ordered after and before the current stream's work."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


class CapturedStep:
    """Function of tensors that returns tensors, replayed from a CUDA graph.

    The first `warmup` calls run the body eagerly, on the stream of the later capture, on which DDP
    must have been constructed too; the next one captures it. Inputs are copied into buffers that
    the graph reads, so they must keep their shapes. The graph's memory stays allocated. Ranks
    capture and replay together, and must `release` it before they leave the process group.
    """

    def __init__(
        self, body: Callable[..., tuple[Tensor, ...]], stream: torch.cuda.Stream, warmup: int
    ) -> None:
        self.body, self.stream, self.warmup, self.calls = body, stream, warmup, 0
        self.device = stream.device
        self.graph = self.buffers = self.found = None

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        if self.calls <= self.warmup:
            current = torch.cuda.current_stream(self.device)
            with on_stream(self.stream):
                found = self.body(*given)
            for x in given:
                x.record_stream(self.stream)
            for x in found:
                x.record_stream(current)
            return found
        if self.graph is None:
            self._capture(given)
        for buffer, x in zip(self.buffers, given, strict=True):
            buffer.copy_(x, non_blocking=True)
        self.graph.replay()
        return tuple(x.clone() for x in self.found)  # the next replay overwrites them

    def release(self) -> None:
        """Wait for the graph and free it and its memory; the next call captures another."""
        if self.graph is not None:
            torch.cuda.synchronize(self.device)
            self.graph.reset()
        self.graph = self.buffers = self.found = None

    def _capture(self, given: Sequence[Tensor]) -> None:
        self.buffers, graph = [x.clone() for x in given], torch.cuda.CUDAGraph()
        # Other threads may pin memory meanwhile.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.found = self.body(*self.buffers)
        self.graph = graph
