"""Faults that take two ranks, what one does and the other does not, and faults that only a GPU has.

Every spin of a kernel is a bounded `torch.cuda._sleep`.
"""

import ctypes
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from faults.small import FROM_STEP, MIB, Small
from faults.wrong import KeptTensors, SpoiltNSA
from nsa.model.parallel import Parallel
from whyhung.process import subject

PATIENCE = timedelta(hours=1)  # no timeout of its own may end what a supervisor should
LONGEST_S = 60.0  # of a spinning kernel: whoever looks has a minute, and then the device is free


class Ranks(Small):
    """Healthy: the small network under DDP, and a collective of its own after each step.

    settings: communication ("gloo"), find_unused_parameters (False).
    """

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        backend = settings.get("communication", "gloo")
        if backend == "nccl":
            self.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(self.device)
        self.first = not dist.is_initialized()  # an oracle makes the subject anew beside this one
        self.rank, self.ranks = subject.join(backend)
        self.spoilt = self.rank == 1  # the rank that does otherwise than the others
        super().__init__(settings, progress)
        unused = {"find_unused_parameters": settings.get("find_unused_parameters", False)}
        place = Parallel("ddp", self.rank, self.ranks, self.device, **unused)
        self.called = place.wrap(self.model)

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        return super().fetch(step * self.ranks + self.rank)

    def ended(self, step: int, loss: Tensor) -> None:
        self.averaged(step, torch.ones(3, device=self.device))

    def averaged(self, step: int, tensor: Tensor) -> None:
        """The step's own collective, over all ranks."""
        dist.all_reduce(tensor)

    def close(self) -> None:
        if self.first:
            dist.destroy_process_group()


class OwnBranch(Ranks, SpoiltNSA):
    """One rank leaves out a branch of the middle layer; find_unused_parameters hides it."""


class SkippedCollective(Ranks):
    """One rank leaves at FROM_STEP, before a collective, and waits for the others at the end."""

    def averaged(self, step: int, tensor: Tensor) -> None:
        if self.spoilt and step == FROM_STEP:
            store = dist.distributed_c10d._get_default_store()
            store.wait(["all ranks have ended"], PATIENCE)
        super().averaged(step, tensor)


class OtherShape(Ranks):
    def averaged(self, step: int, tensor: Tensor) -> None:
        if self.spoilt and step == FROM_STEP:
            tensor = tensor.new_ones(5_000)
        super().averaged(step, tensor)


class OneKilled(Ranks):
    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        if self.spoilt and step == FROM_STEP:
            signal.raise_signal(signal.SIGKILL)
        return super().fetch(step)


class OneWithoutData(Ranks):
    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        if self.spoilt and step >= FROM_STEP:
            time.sleep(3600)
        return super().fetch(step)


class OnDevice(Small):
    """Healthy: the small network on a GPU, with an event a step."""

    device = "cuda"

    def ended(self, step: int, loss: Tensor) -> None:
        torch.cuda.synchronize()
        self.progress.event()


class Spins(OnDevice):
    """A kernel that spins for settings["spin_s"] seconds, and a host that waits for it."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        if step == FROM_STEP:
            spin(self.settings["spin_s"])
            torch.cuda.synchronize()
        return super().forward(step, inputs, targets)


class NeverWritten(OnDevice):
    """A stream that waits until a word of memory is 1, which nobody ever writes."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        if step == FROM_STEP:
            word = torch.zeros(1, dtype=torch.int32, device="cuda")
            torch.cuda.synchronize()
            stream, at = torch.cuda.current_stream().cuda_stream, word.data_ptr()
            driver = ctypes.CDLL("libcuda.so.1")
            # cuStreamWaitValue32(stream, address, value, CU_STREAM_WAIT_VALUE_GEQ)
            arguments = ctypes.c_void_p(stream), ctypes.c_uint64(at), 1, 0
            failed = driver.cuStreamWaitValue32_v2(*arguments)
            assert not failed, f"cuStreamWaitValue32 returned {failed}"
            inputs.sum().item()  # the host waits for the stream
        return super().forward(step, inputs, targets)


class TooMuch(OnDevice):
    def ended(self, step: int, loss: Tensor) -> None:
        super().ended(step, loss)
        if step == FROM_STEP:
            torch.cuda.set_per_process_memory_fraction(0.02)
            self.held = []
            while True:
                self.held.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))


class BadIndex(OnDevice):
    """A kernel's assertion: an index beyond the table, found only at the next synchronisation."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        if step == FROM_STEP:
            table = torch.zeros(4, 4, device="cuda")
            table[torch.full((8,), 2**20, device="cuda")].sum().item()
        return super().forward(step, inputs, targets)


class KeptOnDevice(KeptTensors, OnDevice):
    """The same list on a GPU."""


def spin(seconds: float) -> None:
    """Enqueues one kernel that spins for about so long, at most LONGEST_S."""
    if not 0 < seconds <= LONGEST_S:
        raise ValueError(f"seconds={seconds} must be greater than 0 and at most {LONGEST_S:g}")
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 20_000_000
    torch.cuda._sleep(20 * cycles)  # an idle device's clock takes a moment to rise
    torch.cuda.synchronize()
    began.record()
    torch.cuda._sleep(cycles)
    ended.record()
    torch.cuda.synchronize()
    torch.cuda._sleep(int(cycles * seconds * 1e3 / began.elapsed_time(ended)))


def hold(spec: dict[str, Any]) -> dict:
    """Holds memory on the device for a minute at most; creates spec["file"] when it has it."""
    held = torch.ones(256 * MIB // 4, device="cuda")
    torch.cuda.synchronize()
    Path(spec["file"]).touch()
    time.sleep(LONGEST_S)
    return {"bytes": held.nbytes}
