"""Trials that measure the exhibit: operations and memory of a step, and state that outlives it.

Each runs in a child process. A step that dispatches hundreds of small operations a token takes as
long as dispatching them does, on any GPU: the case study's times follow from its operation counts
and one constant.

The case study held that something builds up over five steps. If so, it has to be somewhere: in
weights, moments, generators, the allocator, the graph, or Python's objects.
"""

import gc
import hashlib
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbook.lab import sweep
from workbook.lab.measure.counting import Count
from workbook.lab.measure.kernels import device_work
from workbook.lab.measure.recorders import MIB, profiled, recorder_for, training_tensors
from workbook.lab.measure.timing import once_ms, wait
from workbook.rooms.case_study.loop.design import SEQUENTIAL, held, peak_mib
from workbook.rooms.case_study.loop.model import attend_loop, attend_masked
from workbook.rooms.case_study.loop.subject import ExhibitLoop

ENTRY = "workbook.rooms.case_study.loop.measure:several"
DEADLINE_S = 580.0  # of the steps that `estimated_memory` is extrapolated from
LAYERS = 5  # of the report's memory table


def count(loss: Callable[[], Tensor]) -> Count:
    """Run `loss()` and its backward once under the counter.

    Changes only gradients. Counts operations dispatched by the host, on a CPU and on a GPU alike.
    """
    with Count() as counter:
        value = loss()
        counter.forward_ended(value)
        value.backward()
    return counter


def count_kernels(step: Callable[[], object]) -> int:
    """Number of kernels that one call of `step` runs on a GPU, without copies and fills."""
    torch.cuda.synchronize()
    with profiled([torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    work = device_work(profile.events())
    return sum(len(at) for name, at in work.items() if not name.startswith(("Memcpy", "Memset")))


def memory(spec: dict[str, Any]) -> dict[str, Any]:
    """Peak of one forward and backward without an optimizer, MiB, and its prediction from shapes.

    spec: settings of workbook.rooms.case_study.loop.subject. The peak is torch's own: allocator
    events on a CPU, max_memory_allocated on a GPU; without what libraries hold from before, which
    is `resident_mib` (of cuBLAS 32 MiB for each of two threads on an H200).
    """
    loop = ExhibitLoop(spec)
    chosen, tokens, device = loop.model.design, loop.settings["tokens"], loop.settings["device"]
    checkpointing = loop.settings["checkpointing"]
    inputs, targets = loop.batch(0)
    loop.model(inputs[:, :1], targets[:, :1])[1].backward()  # libraries allocate their memory now
    loop.model.zero_grad(set_to_none=True)
    wait(torch.device(device))
    started = time.perf_counter()
    with recorder_for(device, training_tensors(loop.model, loop.optimizer)) as recorder:
        recorder.on_phase("forward", 0)
        _, loss = loop.model(inputs, targets)
        recorder.on_phase("backward", 0)
        loss.backward()
        recorder.on_phase("end", 0)
    found = recorder.record()
    resident = found["by_category"].get("resident", 0)
    return {
        "design": loop.settings["design"],
        "layers": chosen.layers,
        "tokens": tokens,
        "checkpointing": checkpointing,
        "peak_mib": (found["peak"] - resident) / MIB,
        "resident_mib": resident / MIB,
        "by_category_mib": {k: v / MIB for k, v in found["by_category"].items()},
        "predicted_mib": held(chosen, tokens, checkpointing=checkpointing).total / MIB,
        "agrees": found["cross_check"].get("agrees", True),
        "seconds": time.perf_counter() - started,
        "loss": loss.item(),
    }


def operations(spec: dict[str, Any]) -> dict[str, Any]:
    """One step's operations, and its seconds: the median of three, forward and backward.

    spec: settings of workbook.rooms.case_study.loop.subject.
    """
    loop = ExhibitLoop(spec)
    device, batch = torch.device(loop.settings["device"]), loop.batch(0)

    def loss() -> Tensor:
        return loop.model(*batch)[1]

    def step() -> None:
        loss().backward()

    step()
    seconds = statistics.median(once_ms(step, device) for _ in range(3)) / 1e3
    counted = count(loss)
    return {
        "path": loop.model.design.path,
        "design": loop.settings["design"],
        "layers": loop.model.design.layers,
        "tokens": loop.settings["tokens"],
        "forward": counted.forward,
        "backward": counted.backward,
        "operations": counted.total,
        "syncs": counted.syncs,
        "nodes": counted.nodes,
        "kernels": count_kernels(step) if device.type == "cuda" else None,
        "seconds": seconds,
        "microseconds": 1e6 * seconds / counted.total,
        "most": counted.by_name.most_common(8),
    }


@torch.no_grad()
def attention(spec: dict[str, Any]) -> dict[str, Any]:
    """Compare the first layer's attention with the reference of NSA, in fp64 on random input: the
    largest difference of the outputs before the last projection, over their largest value.

    spec: settings of workbook.rooms.case_study.loop.subject.
    """
    loop = ExhibitLoop(spec | {"device": "cpu"})
    chosen, tokens = loop.model.design, loop.settings["tokens"]
    layer = loop.model.double().blocks[0].attention
    generator = torch.Generator().manual_seed(loop.settings["seed"])
    x = torch.randn(1, tokens, chosen.dim, generator=generator, dtype=torch.float64)
    inputs = layer.project(x)
    exact = attend_masked(inputs, layer.gate, chosen)
    made = exact if chosen.path == "masked" else attend_loop(inputs, layer.gate, chosen)
    return {
        "path": chosen.path,
        "design": loop.settings["design"],
        "tokens": tokens,
        "defects": list(chosen.defects),
        "error": ((made - exact).abs().max() / exact.abs().max()).item(),
    }


CHANGES = ("weights", "first moments", "second moments", "optimizer's step")  # expected to change


def difference(spec: dict[str, Any]) -> dict[str, Any]:
    """Train to the end of step `after` + 1, and compare the states after the last two steps.

    spec: {"settings": of workbook.rooms.case_study.loop.subject, "after": 4}; steps count from 1.
    Each row has what, before, after, changed, and whether it should change.
    """
    loop, last = ExhibitLoop(spec["settings"]), spec["after"]
    for i in range(last - 1):
        loop.step(i)
    before, after = (_watched_step(loop, i) for i in (last - 1, last))
    columns = ("what", "before", "after", "changed", "should")
    found = [(n, a, after[n], a != after[n], n in CHANGES) for n, a in before.items()]
    return {"after": last, "rows": [dict(zip(columns, row, strict=True)) for row in found]}


def several(spec: dict[str, Any]) -> dict[str, Any]:
    """{"rows"} of the trial `measure` above for each of `settings`, in one process."""
    known = {
        "memory": memory,
        "operations": operations,
        "state": difference,
        "attention": attention,
    }
    measure = known[spec["measure"]]
    return {"rows": [measure(one) for one in spec["settings"]]}


def estimated_memory(
    tokens: Sequence[int], *, longest: int, device: str, folder: str | Path
) -> list[dict[str, Any]]:
    """Estimated memory of a step of the loop as it was, with LAYERS layers, one row a T:
    {"tokens", "mib", "how"}. Up to `longest` extrapolated from real steps of one and two layers, by
    their difference per layer; beyond, or where those failed, from its shapes."""
    near = [t for t in tokens if t <= longest]

    def spec(t: int, share_s: float) -> dict[str, Any]:
        common = {"design": "production", "tokens": t, "device": device}
        two = [common | {"changes": {"layers": n, "defects": [*SEQUENTIAL]}} for n in (1, 2)]
        return {"measure": "memory", "settings": two}

    ended = sweep.measure(
        ENTRY, near, spec, deadline_s=DEADLINE_S, folder=folder, name="loop at T {}".format
    )
    rows = {t: {"mib": peak_mib(LAYERS, t), "how": "from shapes"} for t in tokens}
    for t, one in zip(near, ended, strict=True):
        if one.result:
            first, second = (row["peak_mib"] for row in one.result["rows"])
            mib = first + (LAYERS - 1) * (second - first)
            rows[t] = {"mib": mib, "how": "from real steps of 1 and 2 layers"}
    return [{"tokens": t} | row for t, row in rows.items()]


def _watched_step(loop: ExhibitLoop, i: int) -> dict[str, Any]:
    counter = Count()
    hook = loop.model.register_forward_hook(lambda _, args, out: counter.forward_ended(out[1]))
    with counter:
        loop.step(i)
    hook.remove()
    # The forward's own operations vary with the ranges that its tokens select.
    alike = {"graph nodes": counter.nodes, "backward's operations": counter.backward}
    return state(loop) | alike


def state(loop: ExhibitLoop) -> dict[str, Any]:
    """Fingerprints and counts of all state that outlives a step."""
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
        "Python's generator": hashlib.sha256(repr(random.getstate()).encode()).hexdigest()[:8],
    }
    # Tensors of other types have no memory to count, e.g. those that torch.compile leaves behind.
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter)]
    if loop.settings["device"] == "cuda":
        torch.cuda.synchronize()
        found["GPU's generator"] = digest([torch.cuda.get_rng_state()])
        found["allocated bytes"] = torch.cuda.memory_allocated()
        found["reserved bytes"] = torch.cuda.memory_reserved()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    hooks = (len(m._forward_hooks) + len(m._backward_hooks) for m in loop.model.modules())
    return found | {
        "tensors' bytes": sum(storages.values()),
        "tensors": len(tensors),
        "tensors with a graph": sum(x.grad_fn is not None for x in tensors),
        "modules' hooks": sum(hooks),
    }


def digest(tensors: Iterable[Tensor]) -> str:
    """Eight hex digits of a hash of all bytes."""
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return made.hexdigest()[:8]
