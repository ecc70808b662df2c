"""Child processes: estimates of cells, real steps of cells, the real boundary."""

import gc
import time
from dataclasses import asdict, replace
from typing import Any

import torch

from nsa.attention.registry import Declined
from whyhung.process.child import failure, is_out_of_memory
from workbook.lab.estimate.estimate import estimate, largest
from workbook.lab.measure.recorders import recorded_step
from workbook.lab.search.thresholds import threshold
from workbook.lab.training import TrainingSpec, open_trainer

GIB = 2**30


def estimates(spec: dict[str, Any]) -> dict[str, Any]:
    """Estimate {"cells": specs' fields}: {"rows"}, each with the Estimate's fields, its "outcome"
    ("ok", or "refused" with a "message"), and the processor seconds that it took.

    Other keys of spec: {"gpu": for estimates on "cuda", "deadline_s": for all}.
    """
    return _each(spec, lambda cell: _estimated(cell, spec["gpu"]))


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Run real steps of {"cells": specs' fields}: {"rows"}, each with "outcome" ("ok", "declined",
    "oom", "error"), bytes "allocated" and "reserved", the peak of each of "phases", "by_category",
    "agrees" (two counts of the peak agree), and the bytes "before" it in this process.

    A cell trains two steps; the second is recorded. Between cells everything is freed, including
    cuBLAS workspaces and the allocator's cache, so that each starts as in a fresh process.
    Other keys of spec: {"threads": torch's or None, "deadline_s": for all}.
    """
    return _each(spec, lambda cell: _measured(cell, spec["threads"]))


def _each(spec: dict[str, Any], function: Any) -> dict[str, Any]:
    """Make the row of each cell; cells for which no time is left are "not run"."""
    ends, rows, longest = time.monotonic() + 0.9 * spec["deadline_s"], [], 0.0
    for cell in spec["cells"]:
        started = time.monotonic()
        if started + longest > ends:
            rows.append({"outcome": "not run", "message": "its process had no time left for it"})
            continue
        rows.append(function(TrainingSpec.from_dict(cell)))
        rows[-1]["seconds"] = time.monotonic() - started
        longest = max(longest, rows[-1]["seconds"])
    return {"rows": rows}


def _estimated(cell: TrainingSpec, gpu: str) -> dict[str, Any]:
    started = time.process_time()
    try:
        found = {"outcome": "ok", "message": ""} | asdict(estimate(cell, gpu=gpu))
    except Declined as refusal:
        return {"outcome": "declined", "message": str(refusal)}
    except ValueError as refusal:
        return {"outcome": "refused", "message": str(refusal)}
    except Exception as error:
        return {"outcome": "error", "message": failure(error)["message"]}
    return found | {"processor_s": time.process_time() - started}


def _measured(cell: TrainingSpec, threads: int | None) -> dict[str, Any]:
    before = _fresh(cell.device)
    try:
        with open_trainer(cell, threads=threads) as trainer:
            trainer.step(0)
            found = recorded_step(trainer)[1].record()
    except Declined as refusal:
        return {"outcome": "declined", "message": str(refusal)}
    except Exception as error:
        kind = "oom" if is_out_of_memory(error) else "error"
        return {"outcome": kind, "message": failure(error)["message"]}
    return {
        "outcome": "ok",
        "message": "",
        "allocated": found["peak"],
        "reserved": found.get("reserved"),
        "phases": found["phases"],
        "by_category": found["by_category"],
        "agrees": bool(found["cross_check"].get("agrees")),
        "before": before,
    }


def _fresh(device: str) -> int:
    """Free what the last cell left, as at the start of a process; return the bytes that are still
    held."""
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def estimate_boundary(spec: dict[str, Any]) -> dict[str, Any]:
    """Return {"foretold": the largest value of {"find"} of {"cell"} estimated to fit "gib" GiB of a
    "gpu", "foretold_not": the smallest estimated not to fit, or None}."""
    cell = TrainingSpec.from_dict(spec["cell"])
    found = largest(cell, spec["find"], spec["gib"], gpu=spec["gpu"])
    return {"foretold": found.fits, "foretold_not": found.does_not}


def boundary(spec: dict[str, Any]) -> dict[str, Any]:
    """Find the largest of `values` for which two real steps fit `gib` GiB of the GPU, by bisection.

    spec: {"cell": a spec's fields, "find": the field that `values` set, "gib", "context": bytes of
    them that CUDA itself uses}. Returns {"fits", "does_not": None if all or none fit, "monotone",
    "tried"}. A value that neither succeeded nor ran out of memory is skipped.
    """
    cell, find = TrainingSpec.from_dict(spec["cell"]), spec["find"]
    total = torch.cuda.get_device_properties(0).total_memory
    share = (spec["gib"] * GIB - spec["context"]) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    said = {"ok": False, "oom": True}

    def out_of_memory(value: int) -> bool | None:
        return said.get(_tried(replace(cell, **{find: value})))

    found = threshold(spec["values"], out_of_memory)
    tried = [[value, answer] for value, answer in found.answers]
    same = {"monotone": found.monotone, "tried": tried}
    return {"fits": found.below, "does_not": found.above} | same


def _tried(cell: TrainingSpec) -> str:
    _fresh("cuda")
    try:
        with open_trainer(cell) as trainer:
            for step in (0, 1):
                trainer.step(step)
        torch.cuda.synchronize()
    except Exception as error:
        return "oom" if is_out_of_memory(error) else "error"
    return "ok"
