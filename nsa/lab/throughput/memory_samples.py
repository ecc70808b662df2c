"""What the device and this process hold after each step."""

import math
import resource
from pathlib import Path

import torch

MIB = 2**20
_PAGE = resource.getpagesize()


class MemorySamples:
    """MiB after each step: `device_mib` by torch's allocator, empty without a GPU, and `host_mib`
    in RAM, NaN outside Linux. An observer, or `take` by hand: about 20 us, and nothing is waited
    for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.device_mib: list[float] = []
        self.host_mib: list[float] = []

    def on_step(self, step: int, loss: torch.Tensor) -> None:
        self.take()

    def take(self) -> None:
        if self.device.type == "cuda":
            self.device_mib.append(torch.cuda.memory_allocated(self.device) / MIB)
        self.host_mib.append(_resident_mib())


def _resident_mib() -> float:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / MIB
    except OSError:
        return math.nan
