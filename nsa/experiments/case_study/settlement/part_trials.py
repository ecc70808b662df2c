"""Trials of the settlement on torch alone and on this project's attention: seconds each."""

import sys
from typing import Any


def one_query() -> dict[str, Any]:
    """scaled_dot_product_attention, one query, 9 keys, is_causal=True: whose value comes back?"""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

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
    """One weight of 1, one step of AdamW, gradients 0, 1e-4 and 1e-2, three dtypes."""
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


def branches() -> dict[str, Any]:
    """One branch alone of this project's model: operations, gate gradients, path witness."""
    from nsa.attention.witness import recording
    from nsa.experiments.case_study.loop.operations import count

    found = {}
    for branch in (None, "cmp", "slc", "win"):
        model, loss = _our_model(force_branch=branch)
        with recording() as witness:
            counted = count(loss)
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
    from nsa.experiments.case_study.loop.operations import count

    found = {}
    for backend in ("masked", "packed", "gather"):
        _, loss = _our_model(backend=backend)
        with recording() as witness:
            value = float(loss())
        counted = count(loss)
        paths = witness.record()["paths"]
        found[backend] = {
            "operations": counted.total, "loss": value,
            "paths": {b: sorted(served) for b, served in paths.items()},
        }  # fmt: skip
    return found


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
