"""Peaks that committed runs measured on an H200, as trainings to be estimated."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from workbook.lab.training import TrainingSpec

# Runs, and the parts that today's program would still allocate. Until 2026-11-27 our kernels kept
# less for bf16, which today's estimate would not reproduce. Until 2026-11-23 gather took smaller
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
    older = spec.backend == "triton" and spec.precision == "bf16"  # they kept less, see RUNS
    traced = spec.backend != "sequential" and spec.parallel == "none" and spec.device == "cuda"
    traced = traced and not older
    return spec if traced and not (spec.compile or spec.cuda_graph) else None
