"""What differs between two steps of a training: everything that a step could leave behind.

The case study held that something builds up over five steps. Whatever does has to live somewhere:
in weights, moments, generators, the allocator, the graph, or Python's objects.
"""

import gc
import hashlib
import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nsa.experiments.case_study.loop.operations import Count
from nsa.experiments.case_study.loop.subject import DEFAULTS, ExhibitLoop
from nsa.lab.observers.graph import count_nodes

CHANGES = ("weights", "first moments", "second moments", "optimizer's step")  # as they should


def difference(spec: dict[str, Any]) -> dict[str, Any]:
    """Trains to the end of step `after` + 1, and lays the states after both steps side by side.

    spec: {"settings": of nsa.experiments.case_study.loop.subject, "after": 4}; steps count from 1.
    Each row has what, before, after, changed, and whether it should change.
    """
    loop = ExhibitLoop({**DEFAULTS, **spec["settings"]})
    states = []
    for i in range(spec["after"] + 1):
        watched = i >= spec["after"] - 1
        states.append(_watched_step(loop, i) if watched else loop.step(i) and None)
    before, after = states[-2:]
    rows = [
        {
            "what": name,
            "before": before[name],
            "after": after[name],
            "changed": before[name] != after[name],
            "should": name in CHANGES,
        }
        for name in before
    ]
    return {"after": spec["after"], "rows": rows}


def _watched_step(loop: ExhibitLoop, i: int) -> dict[str, Any]:
    counter = Count()
    seen: list[int] = []
    forward = loop.model.forward

    def watched(*args):
        found = forward(*args)
        # The forward's own operations vary with the ranges that its tokens select.
        seen[:] = count_nodes([found[1]]), counter.by_name.total()
        return found

    loop.model.forward = watched
    try:
        with counter:
            loop.step(i)
    finally:
        del loop.model.forward
    nodes, forward_operations = seen
    return state(loop) | {
        "graph nodes": nodes,
        "backward's operations": counter.by_name.total() - forward_operations,
    }


def state(loop: ExhibitLoop) -> dict[str, Any]:
    """Fingerprints and counts of all that outlives a step."""
    gc.collect()
    states = loop.optimizer.state.values()
    parameters = list(loop.model.parameters())
    found: dict[str, Any] = {
        "weights": digest(parameters),
        "first moments": digest(s["exp_avg"] for s in states),
        "second moments": digest(s["exp_avg_sq"] for s in states),
        "optimizer's step": sorted({int(s["step"]) for s in states}),
        "gradients kept": sum(p.grad is not None for p in parameters),
        "torch's generator": digest([torch.get_rng_state()]),
        "Python's generator": _short(repr(random.getstate()).encode()),
    }
    # Others have no memory to count: what torch.compile leaves behind, say.
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter)]
    if loop.settings["device"] == "cuda":
        torch.cuda.synchronize()
        found["GPU's generator"] = digest([torch.cuda.get_rng_state()])
        found["allocated bytes"] = torch.cuda.memory_allocated()
        found["reserved bytes"] = torch.cuda.memory_reserved()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    found["tensors' bytes"] = sum(storages.values())
    found["tensors"] = len(tensors)
    found["tensors with a graph"] = sum(x.grad_fn is not None for x in tensors)
    found["modules' hooks"] = sum(
        len(m._forward_hooks) + len(m._backward_hooks) for m in loop.model.modules()
    )
    return found


def digest(tensors: Iterable[Tensor]) -> str:
    """Eight hex digits of all bytes."""
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return made.hexdigest()[:8]


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]
