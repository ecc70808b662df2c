"""A whole training step as one CUDA graph, where launches take longer than their work."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nsa.model.batches import Share

if TYPE_CHECKING:
    from nsa.model.parallel import Parallel
    from nsa.model.train_config import TrainConfig

WARMUP = 3  # steps: kernels are compiled and tuned, AdamW's state is made


class CapturedStep:
    """body(share) -> loss, replayed from a CUDA graph.

    The first WARMUP calls run the body as it is, on the stream of the later capture; the next one
    captures it. Each call trains one step. Inputs are copied into buffers that the graph reads;
    batches must keep their shapes. What the graph allocates stays allocated.
    """

    def __init__(self, body: Callable[[Share], Tensor], device: torch.device) -> None:
        self.body, self.device, self.calls = body, device, 0
        self.stream = torch.cuda.Stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, share: Share) -> Tensor:
        self.calls += 1
        if self.calls <= WARMUP:
            return self._warm_up(share)
        if self.graph is None:
            self._capture(share)
        for buffer, x in zip(self.buffers.tensors(), share.tensors(), strict=True):
            buffer.copy_(x, non_blocking=True)
        self.graph.replay()
        return self.loss.clone()  # the next replay overwrites it

    def _warm_up(self, share: Share) -> Tensor:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            loss = self.body(share)
        current.wait_stream(self.stream)
        for x in share.tensors():
            x.record_stream(self.stream)
        loss.record_stream(current)
        return loss

    def _capture(self, share: Share) -> None:
        self.buffers, graph = share.clone(), torch.cuda.CUDAGraph()
        # Other threads pin memory meanwhile, which is theirs to do.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.loss = self.body(self.buffers)
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
