"""Tile sizes by chip."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.kernels.common import power_of_two


class Tile(NamedTuple):
    """Rows and keys that one program holds at a time, its warps and the depth of its pipeline.

    turned: keys, not queries, are the rows of its products; only for dQ of the selected branch.
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
    major, minor = asked_once(torch.cuda.get_device_capability, device)
    return 10 * major + minor


def name_of(device: torch.device) -> str:
    """Name of a CUDA device, e.g. "NVIDIA H200"; "" for a CPU."""
    return asked_once(torch.cuda.get_device_name, device) if device.type == "cuda" else ""


def processors(device: torch.device) -> int:
    """Number of SMs; 1 for a CPU, which runs programs one after the other."""
    if device.type != "cuda":
        return 1
    return asked_once(torch.cuda.get_device_properties, device).multi_processor_count


@lru_cache(maxsize=64)
def asked_once(ask: Callable, device: torch.device) -> Any:
    """Cached ask(device), a constant whose query is slow compared to a short call."""
    return ask(device)


# KiB of shared memory by architecture, for as many programs on an SM as their registers allow.
SHARED = {80: 81, 86: 98, 87: 81, 89: 98, 90: 112, 100: 112, 103: 112, 120: 98, 121: 98}
ACCUMULATED = 16384  # elements of the sums that 4 warps hold in registers
# The fastest of those tried at D = DV = 128 or 64 and 16 bits, by kernel and rows.
HOPPER = {
    128: {
        ("forward", 16): Tile(16, 32, 1, 3),
        ("forward", 64): Tile(64, 64, 4, 3),
        ("dq", 16): Tile(16, 64, 4, 3, turned=True),
        ("dq", 64): Tile(64, 64, 4, 2),
        ("dkdv", 32): Tile(32, 64, 4, 3),
        ("dkdv", 64): Tile(32, 64, 4, 3),
    },
    64: {
        ("forward", 16): Tile(16, 32, 1, 3),
        ("forward", 64): Tile(64, 64, 4, 3),
        ("dq", 16): Tile(16, 32, 1, 3),
        ("dq", 64): Tile(64, 64, 4, 3),
        ("dkdv", 64): Tile(128, 64, 4, 2),
    },
}

# Time of a block in a large tile over its time in a small one.
COST = {128: {"forward": 1.4, "dq": 1.4}, 64: {"forward": 1.65, "dq": 1.6}}


def _hopper(dims: tuple[int, int], bytes_each: int, chip: int) -> dict:
    """Tiles of HOPPER for these sizes, if any."""
    return HOPPER.get(power_of_two(max(dims)), {}) if chip == 90 and bytes_each == 2 else {}


def default_tile(
    kernel: str, rows: int, q: Tensor, v: Tensor, select_block: int, *, few: bool = False
) -> Tile:
    """Default tile of "forward", "dq" or "dkdv" for tiles of `rows` rows of queries.

    Small tiles are memory-bound and have a deeper pipeline. If there are few programs, all should
    run concurrently: fewer rows allow more of them on an SM.
    """
    dims = q.shape[2], v.shape[2]
    return _tile(kernel, rows, dims, q.element_size(), select_block, few, architecture(q.device))


@lru_cache(maxsize=256)
def _tile(
    kernel: str,
    rows: int,
    dims: tuple[int, int],
    bytes_each: int,
    select_block: int,
    few: bool,
    chip: int,
) -> Tile:
    tiles = _hopper(dims, bytes_each, chip)
    found = (few and tiles.get((kernel, rows // 2))) or tiles.get((kernel, rows))
    if found and select_block % found.keys == 0:
        return found
    shared = SHARED.get(chip, min(SHARED.values())) * 1024
    dims = power_of_two(dims[0]), power_of_two(dims[1])
    width = sum(dims)
    # A product of fp32 is unrolled in full.
    keys = min(power_of_two(select_block), 64 if bytes_each < 4 else 32)
    stages = 3 if rows < 64 else 2
    while _shared_bytes(kernel, rows, keys, stages, dims, bytes_each) > shared:
        if stages > 2:
            stages -= 1
        elif kernel == "dkdv" and rows > 16 and rows >= keys:
            rows //= 2
        elif keys > 16:
            keys //= 2
        elif stages > 1:
            stages -= 1
        else:
            break
    sums = {"forward": rows * dims[1], "dq": rows * dims[0], "dkdv": keys * width}[kernel]
    return Tile(rows, keys, 4 if sums <= ACCUMULATED else 8, stages)


def default_cost(kernel: str, q: Tensor, v: Tensor) -> float:
    """Cost of a block in a large tile of "forward" or "dq" relative to a small one."""
    dims = q.shape[2], v.shape[2]
    found = _hopper(dims, q.element_size(), architecture(q.device))
    wide = 64 if found is HOPPER[64] else 128
    return COST[wide][kernel]


def _shared_bytes(
    kernel: str, rows: int, keys: int, stages: int, dims: tuple[int, int], bytes_each: int
) -> int:
    """Bytes of shared memory of a tile, without statistics and scratch."""
    held, streamed = {
        "forward": (rows * dims[0], keys * sum(dims)),
        "dq": (rows * sum(dims), keys * sum(dims)),
        "dkdv": (keys * sum(dims), rows * sum(dims)),
    }[kernel]
    return (held + stages * streamed) * bytes_each
