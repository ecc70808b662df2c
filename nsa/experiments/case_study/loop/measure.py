"""Trials that measure the exhibit: what a step holds, and what it dispatches in which time.

Each runs in a child process, through nsa.lab.process.trial.run_child.
"""

import time
from typing import Any

import torch

from nsa.experiments.case_study.loop.operations import count, count_kernels
from nsa.experiments.case_study.loop.saved import held
from nsa.experiments.case_study.loop.subject import DEFAULTS, ExhibitLoop
from nsa.lab.measure.recorders import MIB, recorder_for


def several(spec: dict[str, Any]) -> dict[str, Any]:
    """{"rows"} of one of the others, `measure`, for each of `settings`, in one process."""
    measure = {"memory": memory, "operations": operations}[spec["measure"]]
    return {"rows": [measure(one) for one in spec["settings"]]}


def memory(spec: dict[str, Any]) -> dict[str, Any]:
    """Peak of one forward and backward without an optimizer, MiB, beside what shapes predict.

    spec: settings of nsa.experiments.case_study.loop.subject. The peak is torch's own: allocator
    events on a CPU, max_memory_allocated on a GPU; without what libraries hold from before, which
    is `resident_mib` (of cuBLAS 32 MiB for each of two threads on an H200).
    """
    loop = ExhibitLoop({**DEFAULTS, **spec})
    parameters = list(loop.model.parameters())

    def watched() -> dict[str, list[torch.Tensor]]:
        gradients = [p.grad for p in parameters if p.grad is not None]
        return {"parameters": parameters, "gradients": gradients}

    tokens, targets = loop.batch(0)
    loop.model(tokens[:, :1], targets[:, :1])[1].backward()  # libraries make their own memory now
    loop.model.zero_grad(set_to_none=True)
    if loop.settings["device"] == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    with recorder_for(loop.settings["device"], watched) as recorder:
        recorder.on_phase("forward", 0)
        _, loss = loop.model(tokens, targets)
        recorder.on_phase("backward", 0)
        loss.backward()
        recorder.on_phase("end", 0)
    found = recorder.record()
    predicted = held(loop.model.design, loop.settings["tokens"])
    resident = found["by_category"].get("resident", 0)
    return {
        "layers": loop.model.design.layers,
        "tokens": loop.settings["tokens"],
        "peak_mib": (found["peak"] - resident) / MIB,
        "resident_mib": resident / MIB,
        "by_category_mib": {k: v / MIB for k, v in found["by_category"].items()},
        "predicted_mib": predicted.total / MIB,
        "agrees": found["cross_check"].get("agrees", True),
        "seconds": time.perf_counter() - started,
        "loss": loss.item(),
    }


def operations(spec: dict[str, Any]) -> dict[str, Any]:
    """One step's operations, and its seconds: the median of three, forward and backward.

    spec: settings of nsa.experiments.case_study.loop.subject.
    """
    loop = ExhibitLoop({**DEFAULTS, **spec})
    on_gpu = loop.settings["device"] == "cuda"
    batch = loop.batch(0)

    def loss() -> torch.Tensor:
        return loop.model(*batch)[1]

    def step() -> float:
        started = time.perf_counter()
        loss().backward()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    step()
    seconds = sorted(step() for _ in range(3))[1]
    counted = count(loss)
    return {
        "path": loop.model.design.path,
        "layers": loop.model.design.layers,
        "tokens": loop.settings["tokens"],
        "forward": counted.forward,
        "backward": counted.backward,
        "operations": counted.total,
        "syncs": counted.syncs,
        "nodes": counted.nodes,
        "kernels": count_kernels(step) if on_gpu else None,
        "seconds": seconds,
        "microseconds": 1e6 * seconds / counted.total,
        "most": counted.by_name.most_common(8),
    }
