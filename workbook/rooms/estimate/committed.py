"""Estimates compared with measurements of committed runs on a GPU, cell by cell."""

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
from workbook.lab.estimate.pretend import DEVICE, gpu_named, pretended
from workbook.lab.estimate.trace import Tracker
from workbook.lab.measure import allocations
from workbook.lab.measure.shapes import Shape
from workbook.lab.training import TrainingSpec

MIB = 2**20
# Runs, and the parts that today's program would still allocate. Until 2026-11-27 our kernels kept
# less for bf16, see `kept_since`. Until 2026-11-23 gather took smaller
# chunks and the selected branch's kernels were others; until 2026-11-21, at noon, AdamW was not
# fused, and its temporaries made the optimizer's phase the highest of many steps.
RUNS = {
    "2026-11-21/01_memory_scaling-28623959": {
        "modes": ("forward", "backward"), "backends": ("masked", "sdpa", "packed", "flex"),
    },
    "2026-11-23/04_throughput-c9ebf4f2": {},
    "2026-11-23/04_throughput-fca040d9": {},
    "2026-11-24/01_memory_scaling-72764344": {},
    "2026-11-24/04_throughput-77730ee7": {},
    "2026-11-24/04_throughput-ac7c075d-2": {},
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One peak measured by a run."""

    spec: TrainingSpec
    mode: str  # the phase of the peak; "step": the highest of them
    mib: float
    run: str

    def __str__(self) -> str:
        spec = self.spec
        name = spec.backend if spec.attention == "nsa" else f"{spec.attention} {spec.backend}"
        return spec.told(name, f"B {spec.batch} T {spec.tokens}") + f", {self.mode}"


def cells(root: Path) -> Iterator[Cell]:
    """Yield the peaks in the runs' folders below `root` that one rank measured on an H200, of eager
    programs without data-dependent shapes."""
    for run, only in RUNS.items():
        with (root / run / "metrics.csv").open() as lines:
            for row in csv.DictReader(lines):
                if row["metric"] != "peak_memory" or not row["median"]:
                    continue
                wanted = row["mode"] in only.get("modes", (row["mode"],))
                wanted = wanted and row["backend"] in only.get("backends", (row["backend"],))
                if wanted and (spec := _spec(row)) is not None:
                    yield Cell(spec, row["mode"], float(row["median"]), run)


def _spec(row: dict[str, str]) -> TrainingSpec | None:
    config = json.loads(row["config"])
    config.setdefault("backend", row["backend"])
    config |= {"tokens": int(float(row["x_value"])), "changes": dict(config["changes"])}
    config.setdefault("precision", config.get("dtype"))
    spec = TrainingSpec(
        **{f.name: config[f.name] for f in fields(TrainingSpec) if f.name in config}
    )
    older = spec.backend == "triton" and spec.precision == "bf16"  # see `kept_since`
    traced = spec.backend != "sequential" and spec.parallel == "none" and spec.device == "cuda"
    traced = traced and not older
    return spec if traced and not (spec.compile or spec.cuda_graph) else None


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
CALLS = ("2026-11-23/02_backend_comparison-ca3bca9d", "2026-11-24/02_backend_comparison-1cabf1ae")
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
