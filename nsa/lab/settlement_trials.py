"""Small trials that settle what the case study left open, each in a child process of its own.

Every trial is a function from nothing to plain numbers, seconds long on a CPU. They run the rebuilt
loop of `nsa.lab.exhibits`, this project's attention, or torch alone; none runs the case study's code.
"""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.lab.trial import run_child

ENTRY = "nsa.lab.settlement_trials:run"


@dataclass(frozen=True)
class Ended:
    """How one trial ended; `found` is None unless it ended well."""

    name: str
    outcome: str
    message: str
    seconds: float
    found: dict[str, Any] | None


def run_all(
    names: Sequence[str] = ("all",),
    *,
    workers: int = 2,
    deadline_s: float = 60.0,
    folder: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Ended]:
    """{name: how it ended} of those trials, `workers` at once; ValueError for an unknown name."""
    chosen = tuple(TRIALS) if tuple(names) == ("all",) else tuple(names)
    if unknown := [name for name in chosen if name not in TRIALS]:
        raise ValueError(f"no trial {unknown[0]!r}; there are {', '.join(TRIALS)}")

    def one(name: str) -> Ended:
        kept = None if folder is None else Path(folder, name)
        ended = run_child(ENTRY, {"name": name}, deadline_s=deadline_s, folder=kept)
        if progress:
            said = f"{ended.status}, {ended.seconds:.1f} s"
            print(f"{name}: {said} {ended.message}", file=sys.stderr, flush=True)
        return Ended(name, ended.status, ended.message, ended.seconds, ended.result)

    with ThreadPoolExecutor(workers) as pool:
        return {ended.name: ended for ended in pool.map(one, chosen)}


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """The inside of the child: the trial that spec["name"] names."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return TRIALS[spec["name"]]()


def print_schedule() -> dict[str, Any]:
    """21 healthy steps under three print policies: the lines, and the last one before step 13."""
    from contextlib import redirect_stdout
    from io import StringIO

    from nsa.lab.exhibits.console import last_step
    from nsa.lab.exhibits.subject import make

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
    """When each of 12 steps began, plain, with aux stats and traced: what a deadline cuts off."""
    from nsa.lab.exhibits.subject import make

    arms = {"plain": {}, "aux stats": {"aux_stats": True}, "traced": {"tracing": True}}
    begun: dict[str, list[float]] = {}
    for name, settings in arms.items():
        loop = make({"tokens": 48, "first": 0, "every": 1000, **settings}, None)
        loop.step(0)
        begun[name] = []
        started = time.perf_counter()
        for i in range(1, 13):
            begun[name].append(time.perf_counter() - started)
            loop.step(i)
        begun[name].append(time.perf_counter() - started)  # the end
    return {"begun_s": begun}


def operations() -> dict[str, Any]:
    """The loop beside dense masks: operations, autograd nodes and syncs at two T and batches."""
    from nsa.lab.exhibits import measure

    rows = []
    for path in ("loop", "masked"):
        for tokens, batch in ((64, 1), (128, 1), (64, 2)):
            row = measure.operations({"tokens": tokens, "batch": batch, "changes": _path(path)})
            rows.append({k: v for k, v in row.items() if k != "most"} | {"batch": batch})
    return {"rows": rows}


def state() -> dict[str, Any]:
    """All that outlives a step, after steps 4 and 5."""
    from nsa.lab.exhibits.state import difference

    return difference({"settings": {"tokens": 32, "first": 0, "every": 1000}, "after": 4})


def checkpointing() -> dict[str, Any]:
    """Gradients of 4 layers with each block recomputed, the bound one or the last."""
    import torch

    from nsa.lab.exhibits.design import design
    from nsa.lab.exhibits.model import build

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
        errors = [
            float((g - w).norm() / w.norm()) for g, w in zip(blocks, plain[1], strict=True)
        ]
        found[name] = {"loss": loss, "plain_loss": plain[0], "errors": errors}
    return found


def one_query() -> dict[str, Any]:
    """scaled_dot_product_attention, one query, 9 keys, is_causal=True: whose value comes back?"""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (1, 9, 9))
    o = attend(q, k, v, is_causal=True)
    dq, dk = torch.autograd.grad(o.sum(), (q, k))
    return {
        "from_first_value": float((o - v[:, :, :1]).abs().max()),
        "from_attention": float((o - attend(q, k, v)).abs().max()),
        "largest_gradient_of_q_and_k": max(float(dq.abs().max()), float(dk.abs().max())),
        "wrong_reference_agrees": bool(torch.allclose(o, attend(q, k, v, is_causal=True))),
    }


def boolean_mask() -> dict[str, Any]:
    """True means attend: a causal mask and its negation, with values that name their token."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

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
    """One weight, one step of AdamW, gradients 0, 1e-4 and 1e-2, by dtype; bf16 by learning rate."""
    import torch

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


def branches() -> dict[str, Any]:
    """One branch alone of this project's model: operations, gate gradients, path witness."""
    from nsa.attention.witness import recording

    found = {}
    for branch in (None, "cmp", "slc", "win"):
        model, loss = _our_model(force_branch=branch)
        with recording() as witness:
            counted = _count(loss)
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
    from nsa.attention.witness import recording

    found = {}
    for backend in ("masked", "packed", "gather"):
        _, loss = _our_model(backend=backend)
        with recording() as witness:
            value = float(loss())
        counted = _count(loss)
        paths = witness.record()["paths"]
        found[backend] = {
            "operations": counted.total, "loss": value,
            "paths": {b: sorted(served) for b, served in paths.items()},
        }  # fmt: skip
    return found


def in_place() -> dict[str, Any]:
    """index_add_ beside scatter_add in the graph, and an in-place change of a saved tensor."""
    import torch

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


def recompiles() -> dict[str, Any]:
    """What is compiled in 6 eager steps of the loop, and by torch.compile when T changes."""
    import torch
    import torch._dynamo as dynamo

    from nsa.lab.compilations import Compilations
    from nsa.lab.exhibits.subject import make

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
    from nsa.lab.exhibits.subject import make
    from nsa.lab.operations import graph_nodes

    loop = make({"tokens": 256}, None)
    tokens, targets = loop.batch(0)
    started = time.perf_counter()
    loss = loop.model(tokens, targets)[1]
    made = time.perf_counter() - started
    nodes = graph_nodes(loss)
    started = time.perf_counter()
    del loss
    return {"nodes": nodes, "forward_s": made, "free_s": time.perf_counter() - started}


def planted_nan() -> dict[str, Any]:
    """NaN in the values of each branch: what `strict=True` says, and what it says without."""
    import torch

    from nsa.attention.api import nsa_attention
    from nsa.config import NSAConfig

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
    import json
    import shutil
    import subprocess

    import torch.distributed as dist

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


def _path(path: str) -> dict[str, Any]:
    return {} if path == "loop" else {"path": path, "defects": ["future_scores"]}


def _our_model(**changes: Any):
    import torch

    from nsa.config import NSAConfig
    from nsa.model.config import ModelConfig
    from nsa.model.llama import LanguageModel

    sizes = NSAConfig(compress_block=8, compress_stride=4, select_block=8, select_count=4,
                      window=16)  # fmt: skip
    torch.manual_seed(0)
    config = ModelConfig("settlement", 1, 32, 4, 2, 8, nsa=sizes, backend="gather")
    model = LanguageModel(config.with_(**changes))
    tokens = torch.randint(256, (1, 65), generator=torch.Generator().manual_seed(0))

    def loss():
        return model(tokens[:, :-1], tokens[:, 1:])[1]

    return model, loss


def _count(loss: Callable) -> Any:
    from nsa.lab.operations import count

    return count(loss)


TRIALS: dict[str, Callable[[], dict[str, Any]]] = {
    name.replace("_", "-"): trial
    for name, trial in (
        ("print_schedule", print_schedule), ("deadlines", deadlines), ("operations", operations),
        ("state", state), ("checkpointing", checkpointing), ("one_query", one_query),
        ("boolean_mask", boolean_mask), ("fp16_adamw", fp16_adamw), ("branches", branches),
        ("backends", backends), ("in_place", in_place), ("recompiles", recompiles),
        ("freeing", freeing), ("planted_nan", planted_nan), ("harness", harness),
    )
}  # fmt: skip
