"""Tile sizes: small tables by architecture, so that a first call compiles one kernel, not ten."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """Rows and keys that one program holds at a time, its warps and the depth of its pipeline.

    turned: whether keys, not queries, are the rows of its products; dQ of the selected branch can.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    turned: bool = False


def architecture(device: torch.device) -> int:
    """90, 80, ... for a CUDA device; 90 for a CPU, where kernels are interpreted."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
