"""What the settlement tries: the rebuilt loop, torch alone, and this project's attention.

Every probe is a function from nothing to plain numbers and takes seconds on a CPU; none runs the
case study's code.

Every trial is a function from nothing to plain numbers. They run the rebuilt loop of
`case_study.loop`, this project's attention, or torch alone; none runs the case study's code.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
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
from nsa.lab.measure.counting import Compilations
from nsa.lab.observers.graph import count_nodes
from nsa.model.config import ModelConfig
from nsa.model.llama import LanguageModel


def print_schedule() -> dict[str, Any]:
    """21 healthy steps under three print policies: the lines, and the last one before step 13."""
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
    rows = []
    for path in ("loop", "masked"):
        for tokens, batch in ((64, 1), (128, 1), (64, 2)):
            row = measure.operations({"tokens": tokens, "batch": batch, "changes": _path(path)})
            rows.append({k: v for k, v in row.items() if k != "most"} | {"batch": batch})
    return {"rows": rows}


def state() -> dict[str, Any]:
    """All that outlives a step, after steps 4 and 5."""
    return measure.difference({"settings": {"tokens": 32, "first": 0, "every": 1000}, "after": 4})


def checkpointing() -> dict[str, Any]:
    """Gradients of 4 layers with each block recomputed, the bound one or the last."""
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
    with Compilations() as eager:
        loop = make({"tokens": 16, "first": 0, "every": 1000}, None)
        for i in range(6):
            loop.step(i)
    torch._dynamo.reset()
    fixed = torch.compile(lambda x: (x @ x.T).softmax(-1).sum(), backend="eager", dynamic=False)
    with Compilations() as changing:
        for tokens in (16, 16, 24, 32, 40):
            fixed(torch.ones(tokens, 4))
    return {"eager": eager.count, "five_calls_four_lengths": changing.count}


def freeing() -> dict[str, Any]:
    """Seconds to free a graph that nobody ran backward, beside those that made it."""
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


def one_query() -> dict[str, Any]:
    """scaled_dot_product_attention, one query, 9 keys, is_causal=True: whose value comes back?"""
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (1, 9, 9))
    o = attend(q, k, v, is_causal=True)
    dq, dk = torch.autograd.grad(o.sum(), (q, k))
    o = o.detach()
    return {
        "from_first_value": float((o - v[:, :, :1].detach()).abs().max()),
        "from_attention": float((o - attend(q, k, v).detach()).abs().max()),
        "largest_gradient_of_q_and_k": max(float(dq.abs().max()), float(dk.abs().max())),
    }


def boolean_mask() -> dict[str, Any]:
    """True means attend: a causal mask and its negation, with values that name their token."""
    tokens = 6
    q, k = (torch.randn(1, 1, tokens, 8) for _ in range(2))
    v, causal = torch.eye(tokens)[None, None], torch.ones(tokens, tokens, dtype=torch.bool).tril()

    def ahead(mask):
        return attend(q, k, v, attn_mask=mask)[0, 0]

    right, wrong = ahead(causal), ahead(~causal)
    last = wrong[-1]
    return {
        "right_finite": bool(right.isfinite().all()),
        "right_on_the_future": float(right.triu(1).abs().max()),
        "inverted_on_the_past": float(wrong[:-1].tril().abs().max()),
        "inverted_on_the_future": float(wrong[:-1].triu(1).sum(-1).min()),
        "inverted_last_row": "nan" if bool(last.isnan().all()) else float(last.abs().max()),
    }


def fp16_adamw() -> dict[str, Any]:
    """One weight of 1, one step of AdamW, gradients 0, 1e-4 and 1e-2, three dtypes."""
    found: dict[str, Any] = {}
    for dtype in ("float16", "bfloat16", "float32"):
        for gradient in (0.0, 1e-4, 1e-2):
            weight = torch.nn.Parameter(torch.ones(1, dtype=getattr(torch, dtype)))
            optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0, foreach=False)
            weight.grad = torch.full_like(weight, gradient)
            optimizer.step()
            found[f"{dtype} {gradient:g}"] = str(float(weight.detach()))
    found["eps_in_fp16"] = float(torch.tensor(1e-8, dtype=torch.float16))
    return found


def in_place() -> dict[str, Any]:
    """index_add_ beside scatter_add in the graph, and an in-place change of a saved tensor."""
    p, at = torch.randn(12), torch.tensor([0, 1, 1, 2, 3, 3, 3, 0, 2, 1, 0, 2])
    gradients = []
    for form in ("index_add_", "scatter_add"):
        x = p.clone().requires_grad_()
        zeros = torch.zeros(4)
        y = x * 2
        out = zeros.index_add_(0, at, y) if form == "index_add_" else zeros.scatter_add(0, at, y)
        gradients.append(torch.autograd.grad((out**2).sum(), x)[0])
    x = p.clone().requires_grad_()
    y = x.exp()
    y.add_(1)
    try:
        y.sum().backward()
        raised = ""
    except RuntimeError as error:
        raised = type(error).__name__
    return {"equal": bool(torch.equal(*gradients)), "raised": raised}


def branches() -> dict[str, Any]:
    """One branch alone of this project's model: operations, gate gradients, path witness."""
    found = {}
    for branch in (None, "cmp", "slc", "win"):
        model, loss = _our_model(force_branch=branch)
        with recording() as witness:
            counted = measure.count(loss)
        loss().backward()
        gates = [p.grad for n, p in model.named_parameters() if "gate1" in n or "gate2" in n]
        found[branch or "all"] = {
            "operations": counted.total, "nodes": counted.nodes,
            "gates_with_gradient": sum(g is not None for g in gates),
            "paths": sorted(witness.record()["paths"]),
        }  # fmt: skip
    return found


def backends() -> dict[str, Any]:
    """Three backends of one model: operations and witnesses, which differ where programs do."""
    found = {}
    for backend in ("masked", "packed", "gather"):
        _, loss = _our_model(backend=backend)
        with recording() as witness:
            value = float(loss())
        counted = measure.count(loss)
        paths = witness.record()["paths"]
        found[backend] = {
            "operations": counted.total, "loss": value,
            "paths": {b: sorted(served) for b, served in paths.items()},
        }  # fmt: skip
    return found


def planted_nan() -> dict[str, Any]:
    """NaN in the values of each branch: what `strict=True` says, and what it says without."""
    config = NSAConfig(
        compress_block=4, compress_stride=2, select_block=8, select_count=3, window=8
    )
    q, gates = torch.randn(1, 32, 4, 8), torch.rand(1, 32, 4, 3)
    found = {}
    for planted in ("cmp", "slc", "win"):
        k, v = ({b: torch.randn(1, 32, 2, 8) for b in ("cmp", "slc", "win")} for _ in range(2))
        v[planted][0, 5] = float("nan")
        try:
            nsa_attention(q, k, v, gates, config, backend="gather", strict=True)
            found[planted] = "nothing"
        except FloatingPointError as error:
            found[planted] = str(error)
    return found


def harness() -> dict[str, Any]:
    """What the case study's scripts relied on: a bucket's method, JSON, and the exit code 124."""
    try:
        json.loads("NSA_PREFILL_BATCHED=1\nPATH=/bin")
        parses = True
    except ValueError:
        parses = False
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('dump', flush=True))\n"
        "print('ready', flush=True)\n"
        "end = time.monotonic() + 2.0\n"
        "while time.monotonic() < end: time.sleep(0.05)\n"
        "print('COMPLETED', flush=True)\n"
    )
    ended = None
    if shutil.which("timeout"):
        command = ["timeout", "1", sys.executable, "-S", "-c", code]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return {
        "bucket_has_get_tensor": hasattr(getattr(dist, "GradBucket", None), "get_tensor"),
        "bucket_has_buffer": hasattr(getattr(dist, "GradBucket", None), "buffer"),
        "env_output_is_json": parses,
        "timeout_says": None if ended is None else ended.returncode,
        "timeout_stdout": [] if ended is None else ended.stdout.split(),
    }


def _our_model(**changes: Any):
    sizes = NSAConfig(compress_block=8, compress_stride=4, select_block=8, select_count=4,
                      window=16)  # fmt: skip
    torch.manual_seed(0)
    config = ModelConfig("settlement", 1, 32, 4, 2, 8, nsa=sizes, backend="gather")
    model = LanguageModel(config.with_(**changes))
    tokens = torch.randint(256, (1, 65), generator=torch.Generator().manual_seed(0))

    def loss():
        return model(tokens[:, :-1], tokens[:, 1:])[1]

    return model, loss


TRIALS: dict[str, Callable[[], dict[str, Any]]] = {
    probe.__name__.replace("_", "-"): probe
    for probe in (
        print_schedule, deadlines, operations, state, checkpointing, recompiles, freeing,
        one_query, boolean_mask, fp16_adamw, in_place, branches, backends, planted_nan, harness,
    )
}  # fmt: skip
