"""Faults that take two ranks: what one does and the other does not."""

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nsa.experiments.selfcheck.faults.small import FROM_STEP, Small, TinyNSA
from nsa.lab.process import subject
from nsa.lab.search import planted as tracing_faults
from nsa.model.parallel import Parallel

LAST = 1  # the rank that is spoilt
PATIENCE = timedelta(hours=1)  # no timeout of its own may end what a supervisor should


class Ranks(Small):
    """Healthy: the small network under DDP, and a collective of its own after each step.

    settings: communication ("gloo"), find_unused_parameters (False), sleep_s (0), which the last
    rank sleeps before each step.
    """

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        backend = settings.get("communication", "gloo")
        if backend == "nccl":
            self.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(self.device)
        self.first = not dist.is_initialized()  # an oracle makes the subject anew beside this one
        self.rank, self.ranks = subject.join(backend)
        super().__init__(settings, progress)
        place = Parallel(
            "ddp",
            self.rank,
            self.ranks,
            self.device,
            find_unused_parameters=settings.get("find_unused_parameters", False),
        )
        self.called = place.wrap(self.model)

    @property
    def spoilt(self) -> bool:
        """Whether this rank is the one that does otherwise."""
        return self.rank == LAST

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        if self.spoilt:
            time.sleep(self.settings.get("sleep_s", 0))
        return super().fetch(step * self.ranks + self.rank)

    def ended(self, step: int, loss: Tensor) -> None:
        self.averaged(step, torch.ones(3, device=self.device))

    def averaged(self, step: int, tensor: Tensor) -> None:
        """The step's own collective, over all ranks."""
        dist.all_reduce(tensor)

    def close(self) -> None:
        if self.first:
            dist.destroy_process_group()


class OwnBranch(Ranks, TinyNSA):
    """One rank leaves out a branch of the middle layer; find_unused_parameters hides it."""

    def build(self) -> nn.Module:
        model = super().build()
        tracing_faults.plant("rank branch", model, self.rank, self.ranks)
        return model


class SkippedCollective(Ranks):
    """One rank leaves at FROM_STEP, before a collective, and waits for the others at the end."""

    def averaged(self, step: int, tensor: Tensor) -> None:
        if self.spoilt and step == FROM_STEP:
            store = dist.distributed_c10d._get_default_store()
            store.wait(["all ranks have ended"], PATIENCE)
        super().averaged(step, tensor)


class OtherShape(Ranks):
    """One rank brings another number of elements to a collective."""

    def averaged(self, step: int, tensor: Tensor) -> None:
        if self.spoilt and step == FROM_STEP:
            tensor = tensor.new_ones(5_000)
        super().averaged(step, tensor)


class OneKilled(Ranks):
    """SIGKILL of one rank."""

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        if self.spoilt and step == FROM_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fetch(step)


class OneWithoutData(Ranks):
    """One rank waits for data that does not come, and so all others wait for it."""

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        if self.spoilt and step >= FROM_STEP:
            time.sleep(3600)
        return super().fetch(step)
