"""Processes that end before their steps are done, each in another way, at FROM_STEP."""

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor

from nsa.experiments.selfcheck.faults.small import FROM_STEP, Small

MIB = 2**20


class _AtStep(Small):
    """`happen` before the forward of one step."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        if step == FROM_STEP:
            self.happen()
        return super().forward(step, inputs, targets)

    def happen(self) -> None:
        raise NotImplementedError


class Raises(_AtStep):
    """An exception of a library, with a message of two lines."""

    def happen(self) -> None:
        raise KeyError("the shard 'part-00003' is not in the index\nof 3 shards")


class Overwritten(Small):
    """A tensor that the backward needs is changed in place: autograd counts its versions."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model[0](inputs).exp()
        loss = (self.model[2:](hidden) - targets).square().mean()
        if step == FROM_STEP:
            hidden.add_(1)
        return loss


class Killed(_AtStep):
    """SIGKILL, as the kernel or a batch system sends it: no word, no traceback."""

    def happen(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class BadPointer(_AtStep):
    """A read at an address that is nobody's: SIGSEGV."""

    def happen(self) -> None:
        ctypes.string_at(1)


class Aborts(_AtStep):
    """abort(), as C++ does when an exception meets nobody: SIGABRT."""

    def happen(self) -> None:
        ctypes.CDLL(None).abort()


class Leaves(_AtStep):
    """sys.exit in the middle, with a code of its own."""

    def happen(self) -> None:
        sys.exit(3)


class LeavesSilently(_AtStep):
    """Ends at once and says that all is well, with steps left to do."""

    def happen(self) -> None:
        os._exit(0)


class OutOfAddresses(_AtStep):
    """Tensors until the process may have no more; the limit is its own, the host is not used up."""

    def happen(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 256 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        held = []
        while True:
            held.append(torch.empty(32 * MIB, dtype=torch.uint8))


class TooLarge(_AtStep):
    """One tensor larger than any machine."""

    def happen(self) -> None:
        torch.empty(2**55, dtype=torch.uint8)
