"""A whole training step as one CUDA graph, where launches take longer than their work."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nsa.model.parallel import Parallel
    from nsa.model.train_config import TrainConfig

WARMUP = 3  # steps: kernels are compiled and tuned, AdamW's state is made
Body = Callable[[int, Tensor, Tensor, Tensor | None], Tensor]


class CapturedStep:
    """body(step, tokens, targets, weights) -> loss, replayed from a CUDA graph.

    The first WARMUP calls run the body as it is, on the stream of the later capture; the next one
    captures it. Each call trains one step. Inputs are copied into buffers that the graph reads;
    batches must keep their shapes. What the graph allocates stays allocated.
    """

    def __init__(self, body: Body) -> None:
        self.body, self.calls = body, 0
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(
        self, step: int, tokens: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Tensor:
        self.calls += 1
        batch = tokens, targets, weights
        if self.calls <= WARMUP:
            return self._warm_up(step, batch)
        if self.graph is None:
            self._capture(step, batch)
        for buffer, x in zip(self.buffers, batch, strict=True):
            if x is not None:
                buffer.copy_(x, non_blocking=True)
        self.graph.replay()
        return self.loss.clone()  # the next replay overwrites it

    def _warm_up(self, step: int, batch: tuple) -> Tensor:
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            loss = self.body(step, *batch)
        current.wait_stream(self.stream)
        for x in (*batch, loss):
            if x is not None:
                x.record_stream(self.stream if x is not loss else current)
        return loss

    def _capture(self, step: int, batch: tuple) -> None:
        self.buffers = tuple(x if x is None else x.clone() for x in batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.loss = self.body(step, *self.buffers)
        self.graph = graph


def check_capturable(config: "TrainConfig", device: torch.device, parallel: "Parallel") -> None:
    """Raises ValueError where a whole step cannot be a CUDA graph, saying why."""
    if device.type != "cuda":
        raise ValueError(f"cuda_graph=True needs a CUDA device, got device={str(device)!r}")
    if config.precision == "fp16":
        raise ValueError(
            "cuda_graph=True with precision='fp16': the loss scaler's decisions are not captured; "
            "precision='bf16' needs no scaler"
        )
    if parallel.ranks > 1:
        raise ValueError(
            f"cuda_graph=True with {parallel.ranks} ranks: collectives are not captured; "
            "it is meant for one GPU"
        )
