"""What is foretold beside what committed runs measured on a GPU, cell by cell."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from nsa.lab.estimate.pretend import gpu_named
from nsa.lab.estimate.reserved import replay
from nsa.lab.estimate.trace import steady, trace
from nsa.lab.training import TrainingSpec

MIB = 2**20
# Runs, and what of them today's program would still allocate. Until 2026-11-23 gather took smaller
# chunks and the selected branch's kernels were others; until 2026-11-21, at noon, AdamW was not
# fused, whose temporaries made the optimizer's phase the highest of many steps.
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
    """One peak that a run measured."""

    spec: TrainingSpec
    mode: str  # the phase whose peak it is; "step": the highest of them
    mib: float
    run: str

    def __str__(self) -> str:
        spec = self.spec
        name = spec.backend if spec.attention == "nsa" else f"{spec.attention} {spec.backend}"
        return spec.told(name, f"B {spec.batch} T {spec.tokens}") + f", {self.mode}"


def cells(root: Path) -> Iterator[Cell]:
    """The peaks in the runs' folders below `root` that one rank measured on an H200, of programs
    that run as they are written and have no shapes that depend on data."""
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
    traced = spec.backend != "sequential" and spec.parallel == "none" and spec.device == "cuda"
    return spec if traced and not (spec.compile or spec.cuda_graph) else None


def foretold(spec: TrainingSpec, gpu: str = "NVIDIA H200") -> dict[str, float]:
    """MiB at the peak of each phase of a step, and of the "step", with blocks as the allocator
    would hand them out."""
    chosen = gpu_named(gpu)
    found = replay(steady(trace(spec, chosen).stream), repeat=2).phases
    peaks = {name: (peak.allocated + chosen.resident) / MIB for name, peak in found.items()}
    return peaks | {"step": max(peaks.values())}


def errors(chosen: list[Cell]) -> dict[str, float]:
    """(foretold - measured) / measured of each cell; a spec is traced once."""
    known: dict[str, dict[str, float]] = {}
    found = {}
    for cell in chosen:
        key = json.dumps(cell.spec.to_dict(), sort_keys=True)
        if key not in known:
            known[key] = foretold(cell.spec)
        found[f"{cell.run}: {cell}"] = known[key][cell.mode] / cell.mib - 1
    return found
