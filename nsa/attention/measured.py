"""Measured speed of backends by shape, used by `auto`: a table shipped beside this module.

measured.json holds medians of whole calls by every backend, one process per run; each row has the
name of its run. `workbook.rooms.comparison.record` writes it. Nothing is measured here, and the
table is read once per process.
"""

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from math import log2
from pathlib import Path

import torch

from nsa.attention.inputs import Inputs
from nsa.config import NSAConfig
from nsa.reference.nsa import BRANCHES

TABLE = Path(__file__).with_suffix(".json")
# Largest distance from a measured shape: factors of two, summed over all sizes.
REACH = 2.0
DIRECTIONS = ("forward", "backward")
SIZES = ("tokens", "batch", "heads", "kv_heads", "dim", "value_dim")


@dataclass(frozen=True)
class Ranking:
    """Median latencies of backends at one measured shape, and their source."""

    latency_ms: dict[str, float]
    where: str  # as text: GPU, run, shape, direction

    def __str__(self) -> str:
        times = sorted(self.latency_ms.items(), key=lambda item: item[1])
        return f"measured on {self.where}: " + ", ".join(f"{n} {ms:.3g} ms" for n, ms in times)

    def order(self, names: list[str]) -> list[str]:
        """`names` with the measured ones sorted by latency, among the positions they occupied.

        The others keep their positions, since they were not measured.
        """
        faster = iter(sorted((n for n in names if n in self.latency_ms), key=self.latency_ms.get))
        return [next(faster) if name in self.latency_ms else name for name in names]


def ranking(inputs: Inputs) -> Ranking | None:
    """Measurement nearest to the inputs on a GPU of this architecture; None if none is near.

    A call that will be differentiated is ranked by forward and backward together.
    """
    q = inputs.q
    # torch.compile cannot trace a cache; compiled code uses the registry's order.
    if torch.compiler.is_compiling() or not q.is_cuda:
        return None
    # Whole calls on one length were measured: neither parts of one nor packed sequences.
    part = len(inputs.branches) < len(BRANCHES) or inputs.offset
    if part or inputs.cu_seqlens is not None:
        return None
    tensors = (q, *inputs.k.values(), *inputs.v.values(), inputs.gates)
    training = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    sizes = (q.shape[1], q.shape[0], q.shape[2], inputs.kv_heads, q.shape[3], inputs.value_dim)
    return nearest(*_gpu(q.device), str(q.dtype), sizes, inputs.config, training)


@lru_cache(maxsize=4096)
def nearest(
    gpu: str,
    capability: tuple[int, int],
    dtype: str,
    sizes: tuple[int, ...],
    config: NSAConfig,
    training: bool,
) -> Ranking | None:
    """Same as `ranking`; `sizes` in the order of SIZES, `dtype` as torch prints it."""
    here = _coordinates(dict(zip(SIZES, sizes, strict=True)), config)
    best, least = None, REACH
    for row in rows():
        latency = _latency(row, training)
        same = row["compute_capability"] == f"{capability[0]}.{capability[1]}"
        if len(latency) < 2 or not same or _width(row["dtype"]) != _width(dtype):
            continue
        there = _coordinates(row, NSAConfig(**row["config"]))
        # Another chip of the architecture is a little further away than the same one.
        distance = sum(abs(a - b) for a, b in zip(here, there, strict=True))
        distance += 0.0 if row["gpu"] == gpu else 0.25
        if distance <= least:
            best, least = Ranking(latency, _where(row, training)), distance
    return best


@cache
def _gpu(device: torch.device) -> tuple[str, tuple[int, int]]:
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)


@cache
def rows() -> list[dict]:
    """Rows of the table, each merged with the fields of its run."""
    table = json.loads(TABLE.read_text())
    return [{**table["runs"][row["run"]], **row} for row in table["rows"]]


def _coordinates(sizes: dict, config: NSAConfig) -> list[float]:
    """Coordinates of a shape: log2 of the sizes that determine the work."""
    tokens, batch, heads, kv_heads, dim, value_dim = (sizes[name] for name in SIZES)
    call = tokens, batch * heads, heads / kv_heads, dim + value_dim
    selected = config.select_block * config.select_count
    nsa = config.compress_block, config.compress_stride, selected, config.window
    return [log2(x) for x in (*call, *nsa)]


def _latency(row: dict, training: bool) -> dict[str, float]:
    forward, backward = (row["latency_ms"].get(d, {}) for d in DIRECTIONS)
    if not training:
        return forward
    return {name: ms + backward[name] for name, ms in forward.items() if name in backward}


def _width(dtype: str) -> str:
    """Name of the dtype's speed class: bf16 and fp16 are equally fast on a GPU."""
    return dtype.removeprefix("torch.").replace("bfloat16", "float16")


def _where(row: dict, training: bool) -> str:
    batch = f"B {row['batch']}, " if row["batch"] > 1 else ""
    dims = f"{row['dim']}" if row["dim"] == row["value_dim"] else f"{row['dim']}/{row['value_dim']}"
    return (
        f"{row['gpu']} (run {row['run']}) at {batch}T {row['tokens']}, HQ {row['heads']}, "
        f"HKV {row['kv_heads']}, D {dims}, {'forward and backward' if training else 'forward'}"
    )
