"""Faults that only a GPU has. Every spin is a bounded `torch.cuda._sleep`."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.experiments.selfcheck.faults.small import FROM_STEP, Small

MIB = 2**20
LONGEST_S = 60.0  # of a spinning kernel: whoever looks has a minute, and then the device is free


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


class TooMuch(OnDevice):
    """Tensors until the device is full; its own share of it is made small first."""

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


class KeptOnDevice(OnDevice):
    """A list on the device that gets 2 MiB each step."""

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        super().__init__(settings, progress)
        self.kept: list[Tensor] = []

    def ended(self, step: int, loss: Tensor) -> None:
        super().ended(step, loss)
        self.kept.append(torch.full((2 * MIB // 4,), float(step), device="cuda"))


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
