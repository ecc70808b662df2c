"""What the device and this process hold after each step."""

import ctypes
import math
import resource
from pathlib import Path

import torch

MIB = 2**20
_PAGE = resource.getpagesize()


class MemorySamples:
    """MiB after each step: `device_mib` by torch's allocator, empty without a GPU, and `host_mib`
    in RAM, NaN outside Linux. An observer, or `take` by hand: about 20 us, and nothing is waited
    for. Before the first sample glibc gives back what was freed (milliseconds): pages that it keeps
    would take up what a leak holds, and nothing would grow."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.device_mib: list[float] = []
        self.host_mib: list[float] = []

    def on_step(self, step: int, loss: torch.Tensor) -> None:
        self.take()

    def take(self) -> None:
        if self.device.type == "cuda":
            self.device_mib.append(torch.cuda.memory_allocated(self.device) / MIB)
        if not self.host_mib:
            _give_back_freed()
        self.host_mib.append(resident_mib())


def _give_back_freed() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; musl and macOS lack it
    if trim is not None:
        trim(0)


def resident_mib() -> float:
    """What this process holds in RAM; NaN outside Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / MIB
    except OSError:
        return math.nan
