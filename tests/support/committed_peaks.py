"""Estimates of trainings and attention calls that committed runs measured on an H200."""

import csv
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from nsa.attention import dense
from nsa.attention.api import nsa_attention
from nsa.config import NSAConfig
from nsa.model.dense_attention import sdpa
from workbook.lab.estimate.estimate import Estimate, estimate
from workbook.lab.estimate.gpus import gpu_named
from workbook.lab.estimate.pretend import DEVICE, pretended
from workbook.lab.estimate.trace import Tracker
from workbook.lab.measure import allocations
from workbook.lab.measure.shapes import Shape
from workbook.rooms.estimate.committed import Cell

MIB = 2**20


def kept_since(layers: int, tokens: int, heads: int, value_dim: int, units: int = 1) -> float:
    """Additional MiB at the peak of a `triton` step in bf16, over runs before 2026-11-27.

    A layer's output has 8 more bits per number (`common.rest_of`), and each of `units`
    intermediate outputs an fp32 number per row (`common.fixed_point`).
    """
    return layers * tokens * heads * (value_dim + 4 * units) / MIB


@dataclass(frozen=True)
class Call:
    """Peaks of one attention call, beyond its inputs and results."""

    shape: Shape
    backend: str  # of nsa_attention; "dense-flash" and the like: a kernel of plain attention
    mib: tuple[float, float]  # of the forward, of the backward
    run: str

    def __str__(self) -> str:
        return f"{self.backend} {self.shape}"


# Calls in the runs of notebook 02: gather and flash were different programs then.
CALLS = ("2026-11-23/02_backend_comparison-ca3bca9d", "2026-11-29/02_backend_comparison-765c403d")
CALLED = ("triton", "masked", "sdpa", "packed", "flex", "dense-flash", "dense-cudnn", "dense-fa4")


def calls(root: Path) -> Iterator[Call]:
    """Yield the attention calls with both peaks measured."""
    for run in CALLS:
        found: dict[tuple[str, Shape], dict[str, float]] = defaultdict(dict)
        with (root / run / "metrics.csv").open() as lines:
            for row in csv.DictReader(lines):
                measured = row["metric"] == "peak_memory" and row["median"]
                if measured and row["backend"] in CALLED:
                    key = row["backend"], _shape(row)
                    found[key][row["mode"]] = float(row["median"])
        for (backend, shape), modes in found.items():
            if len(modes) == 2:
                yield Call(shape, backend, (modes["forward"], modes["backward"]), run)


def _shape(row: dict[str, str]) -> Shape:
    config = json.loads(row["config"])
    sizes = {f.name: config[f.name] for f in fields(Shape) if f.name in config}
    nsa = NSAConfig(**{f.name: config[f.name] for f in fields(NSAConfig)})
    return Shape(**sizes | {"tokens": int(float(row["x_value"])), "config": nsa})


def called(backend: str, shape: Shape, gpu: str = "NVIDIA H200") -> tuple[float, float]:
    """Estimate MiB at the peaks of forward and backward, beyond inputs and results."""
    with pretended(gpu_named(gpu), flash=True), Tracker("cuda") as tracker:

        def made(heads: int, dim: int) -> Tensor:
            size = shape.batch, shape.tokens, heads, dim
            options = {"dtype": shape.torch_dtype, "device": DEVICE}
            return torch.empty(size, **options, requires_grad=True)

        stream = tracker.trace.stream
        q, gates, do = (made(shape.heads, n) for n in (shape.dim, 3, shape.value_dim))
        k, v = (made(shape.kv_heads, n) for n in (shape.dim, shape.value_dim))
        before = sum(stream.sizes)
        stream.mark("forward")
        kernel, scale = backend.removeprefix("dense-"), shape.dim**-0.5
        if kernel == "fa4":
            leaves, o = (q, k, v), dense.dense_attention(q, k, v, scale=scale)[0]
        elif kernel != backend:
            leaves, o = (q, k, v), sdpa(q, k, v, kernel)[0]
        else:
            leaves = q, k, v, gates
            o = nsa_attention(q, k, v, gates, shape.config, backend=backend)
        results = before + o.nbytes
        stream.mark("backward")
        gradients = torch.autograd.grad(o, leaves, do)
        both = results + sum(x.nbytes for x in gradients)
        peaks = allocations.replay(stream)["phases"]
    return (peaks["forward"] - results) / MIB, (peaks["backward"] - both) / MIB


def errors(chosen: list[Cell]) -> dict[str, float]:
    """Relative error (estimate - measured) / measured of each cell; a spec is traced once."""
    known: dict[str, Estimate] = {}
    found = {}
    for cell in chosen:
        key = json.dumps(cell.spec.to_dict(), sort_keys=True)
        if key not in known:
            known[key] = estimate(cell.spec)
        held = known[key].phases.get(cell.mode, known[key].allocated)
        found[f"{cell.run}: {cell}"] = held / MIB / cell.mib - 1
    return found
