"""Small trials that settle what the case study left open, each in a child process of its own.

Each is a function without arguments that returns plain numbers in seconds on a CPU, from the loop
of `case_study.loop`, torch alone, or this project's attention, never the case study's code.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from nsa.config import NSAConfig
from nsa.model.config import ModelConfig
from nsa.model.llama import LanguageModel
from nsa.reference.nsa import BRANCHES
from whyhung.process.trial import Outcome
from workbook.lab import sweep
from workbook.lab.measure.counting import Compilations
from workbook.lab.observers.graph import count_nodes
from workbook.rooms.case_study.loop import measure
from workbook.rooms.case_study.loop.design import SEQUENTIAL
from workbook.rooms.case_study.loop.subject import ExhibitLoop, last_step, make
from workbook.rooms.case_study.settlement import notes

Found = dict[str, Any]
ENTRY = "workbook.rooms.case_study.settlement.trials:run"
SILENT = {"first": 0, "every": 1000}  # a print schedule


def print_schedule() -> Found:
    """21 healthy steps under three print policies: the lines, and the last one before step 13."""
    rows = []
    for path, first, checkpoint in (
        ("masked", 3, False),
        ("loop", 5, False),
        ("loop", 5, True),
        ("masked", 5, False),
        ("masked", 8, False),
    ):
        changes = _path(path)
        if checkpoint:
            changes = {"layers": 2, "defects": [*SEQUENTIAL, "late_checkpoint"]}
        loop = make({"first": first, "tokens": 16, "changes": changes, "checkpointing": checkpoint})
        console, seen = StringIO(), None
        with redirect_stdout(console):
            for i in range(21):
                loop.step(i)
                if i == 12:
                    seen = last_step(console.getvalue())
        lines = [line.split("|")[0].strip() for line in console.getvalue().splitlines()]
        variant = {"path": path, "first": first, "checkpoint": checkpoint}
        rows.append(variant | {"last_line_at_step_13": seen, "lines": lines})
    return {"rows": rows}


def deadlines() -> Found:
    """Seconds of each of 10 steps, plain, with aux stats and traced, interleaved, to find where a
    deadline cuts."""
    variants = {"plain": {}, "aux stats": {"aux_stats": True}, "traced": {"tracing": True}}
    loops = {name: make({"tokens": 24, **SILENT, **changed}) for name, changed in variants.items()}
    return {"step_s": _interleaved(loops, 10)}


def batch() -> Found:
    """Seconds of a step with one and two sequences of 64 tokens, interleaved."""
    loops = {str(n): make({"tokens": 64, "batch": n, **SILENT}) for n in (1, 2)}
    return {"step_s": _interleaved(loops, 7)}


def _interleaved(loops: dict[str, ExhibitLoop], rounds: int) -> dict[str, list[float]]:
    """Seconds of `rounds` steps of each loop, interleaved, after one that is discarded.

    CPU time of the trial's only thread, so that other processes do not count.
    """
    steps = {name: partial(next, map(loop.step, count())) for name, loop in loops.items()}
    found = notes.interleaved(steps, rounds + 1, time.process_time)
    return {name: seconds[1:] for name, seconds in found.items()}


def beside_the_step() -> Found:
    """Median seconds of a step, of making its batch, and of writing and flushing a line of CSV."""
    loop, steps = make({"tokens": 32, **SILENT}), count()
    with tempfile.TemporaryFile("w") as log:
        parts = {
            "step_s": lambda: loop.step(next(steps)),
            "data_s": lambda: loop.batch(1),
            "write_s": lambda: (log.write("1,5.6914,1e-05,20\n"), log.flush()),
        }
        return {name: median(seconds) for name, seconds in notes.interleaved(parts, 8).items()}


def operations() -> Found:
    """The loop and dense masks: operations, autograd nodes and syncs at two T and batches."""
    rows = []
    for path in ("loop", "masked"):
        for tokens, batch in ((64, 1), (128, 1), (64, 2)):
            row = measure.operations({"tokens": tokens, "batch": batch, "changes": _path(path)})
            rows.append({k: v for k, v in row.items() if k != "most"} | {"batch": batch})
    loop = make({"tokens": 16, **SILENT})
    counted = measure.count(lambda: loop.model(*loop.batch(0))[1])
    calls = sum(n for name, n in counted.by_name.items() if "attention" in name)
    return {"rows": rows, "attention_calls": calls}


def state() -> Found:
    """All state that outlives a step, after steps 4 and 5."""
    return measure.difference({"settings": {"tokens": 32, **SILENT}, "after": 4})


def checkpointing() -> Found:
    """Gradients of 4 layers with each block recomputed: the bound block, or the last one."""
    changes = {"layers": 4, "path": "masked", "defects": []}
    found = measure.gradients({"tokens": 32, "changes": changes})
    return {
        name: {"loss": found["loss"][name], "plain_loss": found["loss"]["plain"]}
        | {"errors": found[name]}
        for name in ("bound", "late")
    }


def recompiles() -> Found:
    """Number of compilations in 6 eager steps of the loop."""
    with Compilations() as eager:
        loop = make({"tokens": 16, **SILENT})
        for i in range(6):
            loop.step(i)
    return {"eager": eager.count}


def graph() -> Found:
    """Graph of a step's loss: its nodes, its back edges, seconds to make and free it."""
    loop = make({"tokens": 256})
    tokens, targets = loop.batch(0)
    started = time.perf_counter()
    loss = loop.model(tokens, targets)[1]
    made = time.perf_counter() - started
    nodes, back = count_nodes([loss]), back_edges(loss.grad_fn)
    started = time.perf_counter()
    del loss
    freed = time.perf_counter() - started
    return {"nodes": nodes, "back_edges": back, "forward_s": made, "free_s": freed}


def back_edges(root: Any) -> int:
    """Number of edges to a node that is still being walked; any object with `next_functions`."""
    back, done, open_ = 0, set(), {root}
    stack = [(root, iter(root.next_functions))]
    while stack:
        node, edges = stack[-1]
        for follower, _ in edges:
            if follower in open_:
                back += 1
            elif follower is not None and follower not in done:
                open_.add(follower)
                stack.append((follower, iter(follower.next_functions)))
                break
        else:
            stack.pop()
            open_.discard(node)
            done.add(node)
    return back


def _path(path: str) -> dict[str, Any]:
    return {} if path == "loop" else {"path": path, "defects": ["future_scores"]}


def one_query() -> Found:
    """scaled_dot_product_attention, one query, 9 keys, is_causal=True: which value is returned?"""
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (1, 9, 9))
    o = attend(q, k, v, is_causal=True)
    gradients = torch.autograd.grad(o.sum(), (q, k))
    with torch.no_grad():
        return {
            "from_first_value": float((o - v[:, :, :1]).abs().max()),
            "from_attention": float((o - attend(q, k, v)).abs().max()),
            "largest_gradient_of_q_and_k": max(float(g.abs().max()) for g in gradients),
        }


def boolean_mask() -> Found:
    """True means attend: a causal mask and its negation, with values that name their token."""
    tokens = 6
    q, k = (torch.randn(1, 1, tokens, 8) for _ in range(2))
    v, causal = torch.eye(tokens)[None, None], torch.ones(tokens, tokens, dtype=torch.bool).tril()
    right, wrong = (attend(q, k, v, attn_mask=mask)[0, 0] for mask in (causal, ~causal))
    written_out = (q @ k.mT).masked_fill(causal, -torch.inf).softmax(-1)[0, 0, -1]
    last = wrong[-1]
    return {
        "right_not_finite": int((~right.isfinite()).sum()),
        "right_on_the_future": float(right.triu(1).abs().max()),
        "inverted_written_out_nan": int(written_out.isnan().sum()),
        "inverted_last_row_here": "nan" if bool(last.isnan().any()) else float(last.abs().max()),
    }


def fp16_adamw() -> Found:
    """One weight of 1, one step of AdamW, gradients 0, 1e-4 and 1e-2, three dtypes."""
    found: Found = {"eps_in_fp16": float(torch.tensor(1e-8, dtype=torch.float16))}
    for dtype in ("float16", "bfloat16", "float32"):
        for gradient in (0.0, 1e-4, 1e-2):
            weight = torch.nn.Parameter(torch.ones(1, dtype=getattr(torch, dtype)))
            optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0, foreach=False)
            weight.grad = torch.full_like(weight, gradient)
            optimizer.step()
            found[f"{dtype} {gradient:g}"] = str(float(weight.detach()))
    return found


def in_place() -> Found:
    """Graphs of index_add_ and scatter_add, and an in-place change of a saved tensor."""
    x, at = torch.randn(12, requires_grad=True), torch.tensor([0, 1, 1, 2, 3, 3, 3, 0, 2, 1, 0, 2])
    outs = torch.zeros(4).index_add_(0, at, x * 2), torch.zeros(4).scatter_add(0, at, x * 2)
    gradients = [torch.autograd.grad((out**2).sum(), x)[0] for out in outs]
    y = x.exp()
    y.add_(1)
    raised = 0
    try:
        y.sum().backward()
    except RuntimeError:
        raised = 1
    return {"difference": float((gradients[0] - gradients[1]).abs().max()), "raised": raised}


def branches() -> Found:
    """This project's model with all three branches, and with each alone: operations and nodes."""
    found = {}
    for branch in (None, *BRANCHES):
        _, counted = _ours(force_branch=branch)
        found[branch or "all"] = {"operations": counted.total, "nodes": counted.nodes}
    return found


def backends() -> Found:
    """Three backends of one model: operations and losses."""
    found = {}
    for backend in ("masked", "packed", "gather"):
        loss, counted = _ours(backend=backend)
        found[backend] = {"operations": counted.total, "loss": loss}
    return found


def _ours(**changes: Any) -> tuple[float, measure.Count]:
    """Loss of this project's model, and the operations of its forward and backward."""
    torch.manual_seed(0)
    sizes = NSAConfig(8, 4, 8, 4, window=16)
    config = ModelConfig("settlement", 1, 32, 4, 2, 8, nsa=sizes, backend="gather")
    model = LanguageModel(config.with_(**changes))
    tokens = torch.randint(256, (1, 65), generator=torch.Generator().manual_seed(0))

    def loss() -> torch.Tensor:
        return model(tokens[:, :-1], tokens[:, 1:])[1]

    return loss().item(), measure.count(loss)


TERMINATED = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print('dump', flush=True))
print('ready', flush=True)
end = time.monotonic() + 2.0
while time.monotonic() < end: time.sleep(0.05)
print('COMPLETED', flush=True)
"""


def harness() -> Found:
    """Tools that the case study's scripts relied on: `env` as JSON, and the exit code of `timeout`.

    ValueError if either program is missing.
    """
    for program in ("env", "timeout"):
        if not shutil.which(program):
            raise ValueError(f"this trial runs `{program}`, which is not on PATH")
    variables = {"PATH": os.environ["PATH"], "NSA_PREFILL_BATCHED": "1"}
    written = subprocess.run(["env"], env=variables, capture_output=True, text=True, check=True)
    try:
        json.loads(written.stdout)
        documents = 1
    except ValueError:
        documents = 0
    command = ["timeout", "1", sys.executable, "-S", "-c", TERMINATED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    completed = "COMPLETED" in ended.stdout.split()
    return {
        "env_documents": documents,
        "timeout_says": ended.returncode if completed else None,
        "timeout_stdout": ended.stdout.split(),
    }


TRIALS: dict[str, Callable[[], Found]] = {
    trial.__name__.replace("_", "-"): trial
    for trial in (
        print_schedule, deadlines, batch, beside_the_step, operations, state, checkpointing,
        recompiles, graph, one_query, boolean_mask, fp16_adamw, in_place, branches, backends,
        harness, *notes.TRIALS,
    )
}  # fmt: skip


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise ValueError for values of the notebook's parameters that could not be run."""
    _chosen(values["trials"])


def _chosen(names: Sequence[str]) -> tuple[str, ...]:
    if tuple(names) == ("all",):
        return tuple(TRIALS)
    if unknown := [name for name in names if name not in TRIALS]:
        raise ValueError(f"no trial {unknown[0]!r}; there are {', '.join(TRIALS)}")
    return tuple(names)


def run_all(
    names: Sequence[str] = ("all",),
    *,
    workers: int = 2,
    deadline_s: float = 60.0,
    folder: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Outcome]:
    """Run those trials, `workers` at once; return the outcomes. ValueError for an unknown name."""
    chosen = _chosen(names)
    how = {"deadline_s": deadline_s, "workers": workers, "folder": folder, "progress": progress}
    ended = sweep.measure(ENTRY, chosen, lambda name, share_s: {"name": name}, **how)
    return dict(zip(chosen, ended, strict=True))


def run(spec: dict[str, Any]) -> Found:
    """Run the trial spec["name"] inside the child process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return TRIALS[spec["name"]]()
