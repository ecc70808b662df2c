"""A whole training step as one CUDA graph, where launches take longer than their work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from nsa.model.data import Share

if TYPE_CHECKING:
    from nsa.model.parallel import Parallel
    from nsa.model.train_config import TrainConfig

WARMUP = 3  # steps: kernels are compiled and tuned, AdamW's state is made
DDP_WARMUP = 11  # steps: DDP times its first ten by events, which a graph cannot hold


def warmup_steps(parallel: "Parallel") -> int:
    """How many steps run as they are before one is captured."""
    return DDP_WARMUP if parallel.kind == "ddp" else WARMUP


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """What is launched inside goes to `stream`, after and before all that the current one gets.

    None is the current one itself.
    """
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


class CapturedStep:
    """body(share) -> loss, replayed from a CUDA graph.

    The first `warmup` calls run the body as it is, on the stream of the later capture, on which
    DDP must have been made too; the next one captures it. Each call trains one step. Inputs are
    copied into buffers that the graph reads; batches must keep their shapes. What the graph
    allocates stays allocated. Ranks capture and replay together, with NCCL's collectives in the
    graph, and must `release` it before they leave the process group.
    """

    def __init__(
        self, body: Callable[[Share], Tensor], stream: torch.cuda.Stream, warmup: int = WARMUP
    ) -> None:
        self.body, self.stream, self.warmup, self.calls = body, stream, warmup, 0
        self.device = stream.device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.buffers: Share | None = None
        self.loss: Tensor | None = None

    def __call__(self, share: Share) -> Tensor:
        self.calls += 1
        if self.calls <= self.warmup:
            return self._warm_up(share)
        if self.graph is None:
            self._capture(share)
        for buffer, x in zip(self.buffers.tensors(), share.tensors(), strict=True):
            buffer.copy_(x, non_blocking=True)
        self.graph.replay()
        return self.loss.clone()  # the next replay overwrites it

    def release(self) -> None:
        """Waits for the graph and lets go of it and its memory; the next call captures another."""
        if self.graph is not None:
            torch.cuda.synchronize(self.device)
            self.graph.reset()
        self.graph = self.buffers = self.loss = None

    def _warm_up(self, share: Share) -> Tensor:
        current = torch.cuda.current_stream(self.device)
        with on_stream(self.stream):
            loss = self.body(share)
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
    if parallel.kind == "fsdp":
        raise ValueError(
            "cuda_graph=True with parallel='fsdp': FSDP2 gathers and frees parameters by the "
            "host's hand in every step; parallel='ddp' would do, or cuda_graph=False"
        )
    if parallel.find_unused_parameters:
        raise ValueError(
            "cuda_graph=True with find_unused_parameters=True: the host reads in every step what "
            "was unused; static_graph=True finds it once"
        )
    if parallel.kind == "ddp" and dist.is_initialized() and "nccl" not in dist.get_backend():
        raise ValueError(
            f"cuda_graph=True with backend={dist.get_backend()!r}: only NCCL's collectives can be "
            "captured; backend='nccl' would do"
        )
