"""Trials of the settlement on the rebuilt loop, `case_study.loop`: seconds each on a CPU."""

import time
from typing import Any


def print_schedule() -> dict[str, Any]:
    """21 healthy steps under three print policies: the lines, and the last one before step 13."""
    from contextlib import redirect_stdout
    from io import StringIO

    from nsa.experiments.case_study.loop.console import last_step
    from nsa.experiments.case_study.loop.subject import make

    found: dict[str, Any] = {"paths": {}}
    for first in (3, 5, 8):
        for path in ("loop", "masked") if first == 5 else ("masked",):
            settings = {"first": first, "tokens": 16, "changes": _path(path)}
            loop, console, seen = make(settings, None), StringIO(), None
            with redirect_stdout(console):
                for i in range(21):
                    loop.step(i)
                    if i == 12:
                        seen = last_step(console.getvalue())
            lines = [line.split("|")[0].strip() for line in console.getvalue().splitlines()]
            found["paths"].setdefault(path, []).append(
                {"first": first, "steps": 21, "last_line_at_step_13": seen, "lines": lines}
            )
    return found


def deadlines() -> dict[str, Any]:
    """When each of 10 steps began, plain, with aux stats and traced: what a deadline cuts off."""
    from nsa.experiments.case_study.loop.subject import make

    arms = {"plain": {}, "aux stats": {"aux_stats": True}, "traced": {"tracing": True}}
    begun: dict[str, list[float]] = {}
    for name, settings in arms.items():
        loop = make({"tokens": 24, "first": 0, "every": 1000, **settings}, None)
        loop.step(0)
        begun[name] = []
        started = time.perf_counter()
        for i in range(1, 11):
            begun[name].append(time.perf_counter() - started)
            loop.step(i)
        begun[name].append(time.perf_counter() - started)  # the end
    return {"begun_s": begun}


def operations() -> dict[str, Any]:
    """The loop beside dense masks: operations, autograd nodes and syncs at two T and batches."""
    from nsa.experiments.case_study.loop import measure

    rows = []
    for path in ("loop", "masked"):
        for tokens, batch in ((64, 1), (128, 1), (64, 2)):
            row = measure.operations({"tokens": tokens, "batch": batch, "changes": _path(path)})
            rows.append({k: v for k, v in row.items() if k != "most"} | {"batch": batch})
    return {"rows": rows}


def state() -> dict[str, Any]:
    """All that outlives a step, after steps 4 and 5."""
    from nsa.experiments.case_study.loop.state import difference

    return difference({"settings": {"tokens": 32, "first": 0, "every": 1000}, "after": 4})


def checkpointing() -> dict[str, Any]:
    """Gradients of 4 layers with each block recomputed, the bound one or the last."""
    import torch

    from nsa.experiments.case_study.loop.design import design
    from nsa.experiments.case_study.loop.model import build

    tokens = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(0))

    def gradients(defects: tuple[str, ...], on: bool):
        model = build(design("tiny", layers=4, path="masked", defects=defects), checkpointing=on)
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        blocks = [torch.cat([p.grad.flatten() for p in b.parameters()]) for b in model.blocks]
        return float(loss), blocks

    plain = gradients((), False)
    found = {}
    for name, defects in (("bound", ()), ("late", ("late_checkpoint",))):
        loss, blocks = gradients(defects, True)
        errors = [float((g - w).norm() / w.norm()) for g, w in zip(blocks, plain[1], strict=True)]
        found[name] = {"loss": loss, "plain_loss": plain[0], "errors": errors}
    return found


def recompiles() -> dict[str, Any]:
    """What is compiled in 6 eager steps of the loop, and by torch.compile when T changes."""
    import torch
    import torch._dynamo as dynamo

    from nsa.experiments.case_study.loop.subject import make
    from nsa.lab.measure.compilations import Compilations

    with Compilations() as eager:
        loop = make({"tokens": 16, "first": 0, "every": 1000}, None)
        for i in range(6):
            loop.step(i)
    dynamo.reset()
    fixed = torch.compile(lambda x: (x @ x.T).softmax(-1).sum(), backend="eager", dynamic=False)
    with Compilations() as changing:
        for tokens in (16, 16, 24, 32, 40):
            fixed(torch.ones(tokens, 4))
    return {"eager": eager.count, "five_calls_four_lengths": changing.count}


def freeing() -> dict[str, Any]:
    """Seconds to free a graph that nobody ran backward, beside those that made it."""
    from nsa.experiments.case_study.loop.subject import make
    from nsa.lab.observers.graph import count_nodes

    loop = make({"tokens": 256}, None)
    tokens, targets = loop.batch(0)
    started = time.perf_counter()
    loss = loop.model(tokens, targets)[1]
    made = time.perf_counter() - started
    nodes = count_nodes([loss])
    started = time.perf_counter()
    del loss
    return {"nodes": nodes, "forward_s": made, "free_s": time.perf_counter() - started}


def _path(path: str) -> dict[str, Any]:
    return {} if path == "loop" else {"path": path, "defects": ["future_scores"]}
