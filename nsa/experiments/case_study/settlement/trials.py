"""Small trials that settle what the case study left open, each in a child process of its own.

Each is a function from nothing to plain numbers that takes seconds on a CPU: of the rebuilt loop of
`case_study.loop`, torch alone, or this project's attention; none runs the case study's code.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention as attend

from nsa.attention.api import nsa_attention
from nsa.attention.witness import recording
from nsa.config import NSAConfig
from nsa.experiments.case_study.loop import measure
from nsa.experiments.case_study.loop.design import design
from nsa.experiments.case_study.loop.model import build
from nsa.experiments.case_study.loop.subject import last_step, make
from nsa.lab import sweep
from nsa.lab.measure.counting import Compilations
from nsa.lab.observers.graph import count_nodes
from nsa.lab.process.trial import Outcome
from nsa.model.config import ModelConfig
from nsa.model.llama import LanguageModel
from nsa.reference.nsa import BRANCHES

Found = dict[str, Any]
ENTRY = "nsa.experiments.case_study.settlement.trials:run"
SILENT = {"first": 0, "every": 1000}  # a print schedule


def print_schedule() -> Found:
    """21 healthy steps under three print policies: the lines, and the last one before step 13."""
    paths: dict[str, list[Found]] = {"masked": [], "loop": []}
    for path, first in (("masked", 3), ("loop", 5), ("masked", 5), ("masked", 8)):
        loop = make({"first": first, "tokens": 16, "changes": _path(path)})
        console, seen = StringIO(), None
        with redirect_stdout(console):
            for i in range(21):
                loop.step(i)
                if i == 12:
                    seen = last_step(console.getvalue())
        lines = [line.split("|")[0].strip() for line in console.getvalue().splitlines()]
        row = {"first": first, "steps": 21, "last_line_at_step_13": seen, "lines": lines}
        paths[path].append(row)
    return {"paths": paths}


def deadlines() -> Found:
    """When each of 10 steps began, plain, with aux stats and traced: what a deadline cuts off."""
    arms = {"plain": {}, "aux stats": {"aux_stats": True}, "traced": {"tracing": True}}
    begun: dict[str, list[float]] = {}
    for name, settings in arms.items():
        loop = make({"tokens": 24, **SILENT, **settings})
        loop.step(0)
        begun[name], started = [], time.perf_counter()
        for i in range(1, 11):
            begun[name].append(time.perf_counter() - started)
            loop.step(i)
        begun[name].append(time.perf_counter() - started)  # the end
    return {"begun_s": begun}


def operations() -> Found:
    """The loop beside dense masks: operations, autograd nodes and syncs at two T and batches."""
    rows = []
    for path in ("loop", "masked"):
        for tokens, batch in ((64, 1), (128, 1), (64, 2)):
            row = measure.operations({"tokens": tokens, "batch": batch, "changes": _path(path)})
            rows.append({k: v for k, v in row.items() if k != "most"} | {"batch": batch})
    return {"rows": rows}


def state() -> Found:
    """All that outlives a step, after steps 4 and 5."""
    return measure.difference({"settings": {"tokens": 32, **SILENT}, "after": 4})


def checkpointing() -> Found:
    """Gradients of 4 layers with each block recomputed, the bound one or the last."""
    tokens = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(0))

    def gradients(on: bool, *defects: str) -> tuple[float, list[torch.Tensor]]:
        model = build(design("tiny", layers=4, path="masked", defects=defects), checkpointing=on)
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        blocks = [torch.cat([p.grad.flatten() for p in b.parameters()]) for b in model.blocks]
        return loss.item(), blocks

    plain_loss, plain = gradients(False)
    found = {}
    for name, defects in (("bound", ()), ("late", ("late_checkpoint",))):
        loss, blocks = gradients(True, *defects)
        errors = [float((g - w).norm() / w.norm()) for g, w in zip(blocks, plain, strict=True)]
        found[name] = {"loss": loss, "plain_loss": plain_loss, "errors": errors}
    return found


def recompiles() -> Found:
    """What is compiled in 6 eager steps of the loop, and by torch.compile when T changes."""
    with Compilations() as eager:
        loop = make({"tokens": 16, **SILENT})
        for i in range(6):
            loop.step(i)
    torch._dynamo.reset()
    fixed = torch.compile(lambda x: (x @ x.T).softmax(-1).sum(), backend="eager", dynamic=False)
    with Compilations() as changing:
        for tokens in (16, 16, 24, 32, 40):
            fixed(torch.ones(tokens, 4))
    return {"eager": eager.count, "five_calls_four_lengths": changing.count}


def freeing() -> Found:
    """Seconds to free a graph that nobody ran backward, beside those that made it."""
    loop = make({"tokens": 256})
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


def one_query() -> Found:
    """scaled_dot_product_attention, one query, 9 keys, is_causal=True: whose value comes back?"""
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
    last = wrong[-1]
    return {
        "right_finite": bool(right.isfinite().all()),
        "right_on_the_future": float(right.triu(1).abs().max()),
        "inverted_on_the_past": float(wrong[:-1].tril().abs().max()),
        "inverted_on_the_future": float(wrong[:-1].triu(1).sum(-1).min()),
        "inverted_last_row": "nan" if bool(last.isnan().all()) else float(last.abs().max()),
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
    """index_add_ beside scatter_add in the graph, and an in-place change of a saved tensor."""
    x, at = torch.randn(12, requires_grad=True), torch.tensor([0, 1, 1, 2, 3, 3, 3, 0, 2, 1, 0, 2])
    outs = torch.zeros(4).index_add_(0, at, x * 2), torch.zeros(4).scatter_add(0, at, x * 2)
    gradients = [torch.autograd.grad((out**2).sum(), x)[0] for out in outs]
    y = x.exp()
    y.add_(1)
    raised = ""
    try:
        y.sum().backward()
    except RuntimeError as error:
        raised = type(error).__name__
    return {"equal": bool(torch.equal(*gradients)), "raised": raised}


def branches() -> Found:
    """One branch alone of this project's model: operations, gate gradients, path witness."""
    found = {}
    for branch in (None, *BRANCHES):
        model, _, counted, paths = _ours(force_branch=branch)
        gates = [p.grad for n, p in model.named_parameters() if "gate1" in n or "gate2" in n]
        found[branch or "all"] = {
            "operations": counted.total,
            "nodes": counted.nodes,
            "gates_with_gradient": sum(g is not None for g in gates),
            "paths": sorted(paths),
        }
    return found


def backends() -> Found:
    """Three backends of one model: operations and witnesses, which differ where programs do."""
    found = {}
    for backend in ("masked", "packed", "gather"):
        _, loss, counted, paths = _ours(backend=backend)
        served = {branch: sorted(names) for branch, names in paths.items()}
        found[backend] = {"operations": counted.total, "loss": loss, "paths": served}
    return found


def _ours(**changes: Any) -> tuple[LanguageModel, float, measure.Count, dict[str, Any]]:
    """This project's model after a backward, its loss, its operations, and the paths it took."""
    torch.manual_seed(0)
    sizes = NSAConfig(8, 4, 8, 4, window=16)
    config = ModelConfig("settlement", 1, 32, 4, 2, 8, nsa=sizes, backend="gather")
    model = LanguageModel(config.with_(**changes))
    tokens = torch.randint(256, (1, 65), generator=torch.Generator().manual_seed(0))

    def loss() -> torch.Tensor:
        return model(tokens[:, :-1], tokens[:, 1:])[1]

    with recording() as witness:
        value = loss().item()
        counted = measure.count(loss)
    return model, value, counted, witness.record()["paths"]


def planted_nan() -> Found:
    """NaN in the values of each branch: what `strict=True` says of it."""
    config = NSAConfig(4, 2, 8, 3, window=8)
    q, gates = torch.randn(1, 32, 4, 8), torch.rand(1, 32, 4, 3)
    found = {}
    for planted in BRANCHES:
        k, v = ({b: torch.randn(1, 32, 2, 8) for b in BRANCHES} for _ in range(2))
        v[planted][0, 5] = float("nan")
        try:
            nsa_attention(q, k, v, gates, config, backend="gather", strict=True)
            found[planted] = "nothing"
        except FloatingPointError as error:
            found[planted] = str(error)
    return found


TERMINATED = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print('dump', flush=True))
print('ready', flush=True)
end = time.monotonic() + 2.0
while time.monotonic() < end: time.sleep(0.05)
print('COMPLETED', flush=True)
"""


def harness() -> Found:
    """What the case study's scripts relied on: a bucket's method, JSON, and the exit code 124."""
    try:
        json.loads("NSA_PREFILL_BATCHED=1\nPATH=/bin")
        parses = True
    except ValueError:
        parses = False
    ended = None
    if shutil.which("timeout"):
        command = ["timeout", "1", sys.executable, "-S", "-c", TERMINATED]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    bucket = getattr(dist, "GradBucket", None)
    return {
        "bucket_has_get_tensor": hasattr(bucket, "get_tensor"),
        "bucket_has_buffer": hasattr(bucket, "buffer"),
        "env_output_is_json": parses,
        "timeout_says": ended and ended.returncode,
        "timeout_stdout": ended.stdout.split() if ended else [],
    }


TRIALS: dict[str, Callable[[], Found]] = {
    trial.__name__.replace("_", "-"): trial
    for trial in (
        print_schedule, deadlines, operations, state, checkpointing, recompiles, freeing,
        one_query, boolean_mask, fp16_adamw, in_place, branches, backends, planted_nan, harness,
    )
}  # fmt: skip


def run_all(
    names: Sequence[str] = ("all",),
    *,
    workers: int = 2,
    deadline_s: float = 60.0,
    folder: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Outcome]:
    """How each of those trials ended, `workers` at once; ValueError for an unknown name."""
    chosen = tuple(TRIALS) if tuple(names) == ("all",) else tuple(names)
    if unknown := [name for name in chosen if name not in TRIALS]:
        raise ValueError(f"no trial {unknown[0]!r}; there are {', '.join(TRIALS)}")
    how = {"deadline_s": deadline_s, "workers": workers, "folder": folder, "progress": progress}
    ended = sweep.measure(ENTRY, chosen, lambda name, share_s: {"name": name}, **how)
    return dict(zip(chosen, ended, strict=True))


def run(spec: dict[str, Any]) -> Found:
    """The inside of the child: the trial that spec["name"] names."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return TRIALS[spec["name"]]()
