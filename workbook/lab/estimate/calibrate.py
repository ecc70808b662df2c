"""Calibration of a GPU's memory beyond tensors, on this machine: a row for `gpus.GPUS`."""

import gc
from dataclasses import replace
from typing import Any

import torch

from whyhung.process import preflight
from whyhung.process.trial import run_child
from workbook.lab.estimate.gpus import GIB, MIB, Gpu
from workbook.lab.training import TrainingSpec, open_trainer

DEADLINE_S = 300.0
STEP = {"preset": "cpu_test", "tokens": 256, "backend": "masked", "precision": "bf16"}


def calibrated() -> Gpu:
    """Return the first visible GPU, with `resident` and `context` measured by a tiny training in
    a child process. ValueError without a GPU, if other processes use it, or if that training
    failed."""
    if not torch.cuda.is_available():
        raise ValueError("a GPU is calibrated on itself, and torch finds none here")
    if others := preflight.foreign():
        raise ValueError(f"{others[0]}; calibrate where no other process uses it")
    ended = run_child(f"{__name__}:measure", {}, deadline_s=DEADLINE_S)
    if ended.result is None:
        raise ValueError(f"the training that was to be read did not end well: {ended.message}")
    found = ended.result
    return Gpu(**found | {"capability": tuple(found["capability"]), "measured": True})


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure in a child: the GPU's properties, bytes left in torch's allocator after a training,
    and bytes used according to nvidia-smi beyond those it reserved. RuntimeError if nvidia-smi
    reports nothing."""
    before = preflight.used_mib()
    step = replace(TrainingSpec(**STEP, data="synthetic", device="cuda"), **spec)
    with open_trainer(step) as trainer:
        for number in (0, 1):
            trainer.step(number)
    del trainer
    gc.collect()
    torch.cuda.synchronize()
    after = preflight.used_mib()
    if not before or not after:
        raise RuntimeError("nvidia-smi does not tell how much memory is used")
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "processors": properties.multi_processor_count,
        "total": properties.total_memory,
        "resident": torch.cuda.memory_allocated(),
        "context": (after[0] - before[0]) * MIB - torch.cuda.memory_reserved(),
    }


def row(gpu: Gpu) -> str:
    """Format the line for `workbook.lab.estimate.gpus.GPUS`."""
    sizes = f"resident=int({gpu.resident / MIB:.6g} * MIB), context={gpu.context // MIB} * MIB"
    what = f'"{gpu.name}", {gpu.capability}, {gpu.processors}, {gpu.total / GIB:.4g}'
    return f"_gpu({what}, {sizes}),"
