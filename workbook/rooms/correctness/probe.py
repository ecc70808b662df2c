"""Probe what an implementation attends to, from outside: values that identify their token.

With value s the s-th unit vector, the output of a query is the weight that it gives to each token.
No code of the implementation is read, so correct and wrong code are probed in the same way.
Imports nothing of the package at the top: `in_copy` first has to choose the copy.
"""

import json
import os
import sys
from functools import partial
from importlib import import_module
from typing import Any

import torch

# Small enough to be drawn, large enough that every branch leaves something out. G is not HKV.
TOKENS, HEADS, KV_HEADS, DIM = 64, 6, 2, 16
SIZES = {
    "compress_block": 8,
    "compress_stride": 4,
    "select_block": 8,
    "select_count": 3,
    "select_initial": 1,
    "select_local": 1,
    "window": 12,
}
HEAD = 4  # the head that is probed: not the first of its group, nor in the first group
CHUNK = 1 << 12  # scores that chunked backends hold at once here, so that there are several chunks
BRANCHES = ("cmp", "slc", "win")


def in_copy(spec: dict[str, Any]) -> dict[str, Any]:
    """Entry for `trial.run_child`: call another entry in the copy of the package at spec["root"].

    spec: "root", a folder of `nsa` and `workbook`; "entry", "package.module:function"; "spec".
    """
    for name in [n for n in sys.modules if n.partition(".")[0] in ("nsa", "workbook")]:
        del sys.modules[name]
    sys.path.insert(0, spec["root"])
    module, _, name = spec["entry"].partition(":")
    return getattr(import_module(module), name)(spec["spec"])


def in_copies(spec: dict[str, Any]) -> dict[str, Any]:
    """Run `in_copy` for each of spec["calls"]: {"found": [{"result": ...} or {"error": why}]}.

    Each runs in its own fork, so that torch is loaded once and copies are isolated; a single call
    runs in this process.
    """
    import torch._dynamo  # operators and checkpoints import it, which takes seconds in each fork

    if spec.get("triton"):
        import triton  # noqa: F401
    torch.set_num_threads(1)  # a fork would wait for threads that it does not have
    called = _called if len(spec["calls"]) == 1 else _forked
    return {"found": [called(call) for call in spec["calls"]]}


def _called(call: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": in_copy(call)}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _forked(call: dict[str, Any]) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(write, "w") as file:
            json.dump(_called(call), file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"ended with status {status}, without a word"}


def look(spec: dict[str, Any]) -> dict[str, Any]:
    """Return {"picture": rows of numbers}: spec["view"], one of VIEWS, of spec["backend"].

    Runs on spec["device"], "cpu" by default.
    """
    picture = VIEWS[spec["view"]](spec["backend"], spec.get("device", "cpu"))
    return {"picture": [[round(x, 5) for x in row] for row in picture.tolist()]}


def gate_gradient(backend: str, device: str):
    """Gates' gradient [T, 3] that the kernel computing <do, o> writes for the second gate."""
    from nsa.kernels.combine import delta_of

    random = torch.Generator().manual_seed(0)
    do, o = (torch.randn(TOKENS, HEADS, DIM, generator=random).to(device) for _ in range(2))
    gradient = torch.zeros(TOKENS, HEADS, 3, device=device)
    delta_of(do, o, gradient, 1)
    return gradient[:, HEAD]


def query_gradient(backend: str, device: str):
    """Gradient of the queries [T, D] through all branches, for the first quarter of the tokens."""
    x = drawn(backend, device, DIM)
    x = {n: t[:, : TOKENS // 4].clone().requires_grad_() for n, t in x.items()}
    o = output(backend, x)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    return torch.autograd.grad(o, x["q"], do)[0][0, :, HEAD]


def recomputed(backend: str, device: str):
    """Matrix [L, L]: layer (column) recomputed in place of each of 4 checkpointed layers (row)."""
    from nsa.config import NSAConfig
    from nsa.model.config import ModelConfig
    from nsa.model.llama import LanguageModel

    torch.manual_seed(0)
    layers = 4
    options = {"nsa": NSAConfig(**SIZES), "backend": backend, "checkpoint": "all"}
    model = LanguageModel(ModelConfig("probe", layers, 32, 4, 2, 8, **options)).to(device)
    ran = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda b, _: ran.append(b.index))
    ids = torch.randint(256, (1, 32), device=device)
    _, loss = model(ids, ids)
    ran.clear()
    loss.backward()
    found = torch.zeros(layers, layers)
    found[list(reversed(range(layers))), ran] = 1
    return found


def drawn(backend: str, device: str, value_dim: int = 0) -> dict[str, Any]:
    """Draw q, k_*, v_*, gates; fp32 for kernels, else fp64. Without `value_dim` values are one-hot.

    Drawn in fp32 on the host, so that both dtypes and all devices hold the same numbers.
    """
    dtype = torch.float32 if backend == "triton" else torch.float64
    random = torch.Generator().manual_seed(0)

    def normal(heads: int, dim: int):
        return torch.randn(1, TOKENS, heads, dim, generator=random).to(device, dtype)

    found = {"q": normal(HEADS, DIM)} | {f"k_{b}": normal(KV_HEADS, DIM) for b in BRANCHES}
    gates = torch.rand(1, TOKENS, HEADS, 3, generator=random).to(device, dtype)
    found["gates"] = gates * 0.6 + 0.2
    if value_dim:
        return found | {f"v_{b}": normal(KV_HEADS, value_dim) for b in BRANCHES}
    units = torch.eye(TOKENS, dtype=dtype, device=device)[None, :, None]
    return found | {f"v_{b}": units.repeat(1, 1, KV_HEADS, 1) for b in BRANCHES}


def output(backend: str, x: dict[str, Any], branches: tuple[str, ...] = BRANCHES):
    """Compute o of the backend, or of the definition for "reference", on `drawn` tensors."""
    from nsa.attention import span
    from nsa.attention.api import nsa_attention
    from nsa.config import NSAConfig
    from nsa.reference.nsa import nsa

    config = NSAConfig(**SIZES)
    k, v = ({b: x[f"{side}_{b}"] for b in BRANCHES} for side in "kv")
    if backend == "reference":
        return nsa(x["q"], k, v, x["gates"], config, branches=branches).o
    before, span.ELEMENTS = span.ELEMENTS, CHUNK
    try:
        return nsa_attention(x["q"], k, v, x["gates"], config, backend=backend, branches=branches)
    finally:
        span.ELEMENTS = before


def weights(branches: tuple[str, ...], gated: bool, backend: str, device: str) -> torch.Tensor:
    """Weights [T, T] that each query gives to each token, summed over these branches.

    Gates are 1, or between 0.2 and 0.8 if `gated`.
    """
    x = drawn(backend, device)
    if not gated:
        x["gates"] = torch.ones_like(x["gates"])
    with torch.no_grad():
        return output(backend, x, branches)[0, :, HEAD]


VIEWS = {
    "compressed": partial(weights, ("cmp",), False),
    "selected": partial(weights, ("slc",), False),
    "window": partial(weights, ("win",), False),
    "mixed": partial(weights, ("cmp", "slc"), True),
    "gate_gradient": gate_gradient,
    "query_gradient": query_gradient,
    "recomputed": recomputed,
}
