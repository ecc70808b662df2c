"""Every backend held to the definition in fp64, and proof that the rule can say no.

`hold_all` runs in a child process, where Triton's kernels can be interpreted without a GPU.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from nsa.lab.process.trial import run_child

ENTRY = "nsa.experiments.correctness.oracle:hold_all"
BRANCHES = ("cmp", "slc", "win")
# Rows of the case study's mistakes and of lazy ones, which the rule must turn down.
IMPOSTORS = ("all zero", "x 1.01", "only the first key", "w + 1 keys", "block of its own dropped")


def measure(
    shapes: Sequence[dict[str, Any]],
    *,
    device: str = "cpu",
    workers: int = 1,
    deadline_s: float = 120.0,
    folder: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Rows of `hold_all` on these shapes (Shape.to_dict()), which up to `workers` children share.

    RuntimeError if a child did not end well: without its oracle there is nothing to look at.
    """
    env = environment(device)
    each = max(1, -(-len(shapes) // workers))
    shares = [list(shapes[first : first + each]) for first in range(0, len(shapes), each)]

    def held(number: int) -> list[dict[str, Any]]:
        spec = {"shapes": shares[number], "device": device}
        place = None if folder is None else Path(folder) / f"{number}"
        ended = run_child(ENTRY, spec, deadline_s=deadline_s, folder=place, env=env)
        if ended.status != "ok":
            said = f"the oracle ended as {ended.status}: {ended.message}"
            raise RuntimeError(f"{said}\n{ended.evidence}")
        return ended.result["rows"]

    with ThreadPoolExecutor(max(1, len(shares))) as pool:
        return [row for mine in pool.map(held, range(len(shares))) for row in mine]


def environment(device: str) -> dict[str, str]:
    """Variables of a child: without a GPU the kernels run, too, one program after the other."""
    return {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}


def hold_all(spec: dict[str, Any]) -> dict[str, Any]:
    """{"rows": ...}: one row a shape, implementation and tensor (o, d_q, d_k_cmp, ...).

    A row has `shape`, `dtype`, `who`, `kind` ("backend" or "impostor"), `tensor`, `outcome` ("held"
    or "red"; "declined" for all of a backend that does not take the inputs, "no gradient" for its
    gradients alone), `error` and `limit`, both relative to the largest exact value, and `message`.
    """
    import torch

    from nsa.attention import registry
    from nsa.lab.measure.attention_inputs import draw
    from nsa.lab.measure.shapes import Shape

    if spec["device"] == "cpu":
        torch.set_num_threads(1)
    rows = []
    for one in spec["shapes"]:
        shape = Shape.from_dict(one)
        drawn = draw(shape, spec["device"])
        wide = _cast(drawn.leaves(), torch.float64)
        blocks = _reference(wide, shape.config, None).blocks
        defined = partial(_reference, config=shape.config, blocks=blocks)
        exact = _outcome(lambda x, f=defined: f(x).o, wide, drawn.do)
        narrow = _cast(drawn.leaves(), shape.torch_dtype)
        same = _outcome(lambda x, f=defined: f(x).o, narrow, drawn.do)
        given = {"shape": str(shape), "dtype": shape.dtype}
        for name in registry.names():
            found = _backend(name, drawn, blocks)
            rows += [given | row for row in _held(name, "backend", found, same, exact, shape)]
        for name in IMPOSTORS:
            o = _impostor(name, same["o"], narrow, shape, blocks)
            rows += [given | r for r in _held(name, "impostor", {"o": o}, same, exact, shape)]
    return {"rows": rows}


def _held(who: str, kind: str, found: Any, same: dict, exact: dict, shape: Any) -> list[dict]:
    from nsa.lab.measure.accuracy import AccuracyError, hold

    if isinstance(found, str):
        return [{"who": who, "kind": kind, "tensor": "", "outcome": "declined", "message": found}]
    largest = max(float(x.abs().max()) for name, x in exact.items() if name != "o")
    rows = []
    for name, got in found.items():
        row = {"who": who, "kind": kind, "tensor": name, "outcome": "held", "message": ""}
        if isinstance(got, str):
            rows.append(row | {"outcome": "no gradient", "message": got})
            continue
        magnitude = 0.0 if name == "o" else largest
        try:
            error = hold(name, got, same[name], exact[name], dtype=shape.torch_dtype,
                         magnitude=magnitude)  # fmt: skip
            row |= {"error": error.worst, "limit": error.limit}
        except AccuracyError as red:
            scale = float(exact[name].abs().max())
            worst = float((got.double() - exact[name]).abs().max()) / scale
            row |= {"outcome": "red", "message": str(red), "error": worst}
        rows.append(row)
    return rows


def _backend(name: str, drawn: Any, blocks: Any) -> dict[str, Any] | str:
    """o and gradients, or why it declined; where only the backward is declined, o alone."""
    import torch

    from nsa.attention.api import nsa_attention
    from nsa.attention.registry import Declined

    def attend(x):
        k, v = ({b: x[f"{side}_{b}"] for b in BRANCHES} for side in "kv")
        return nsa_attention(
            x["q"], k, v, x["gates"], drawn.shape.config, blocks=blocks, backend=name
        )

    leaves = _cast(drawn.leaves(), drawn.shape.torch_dtype)
    try:
        return _outcome(attend, leaves, drawn.do)
    except Declined as refusal:
        why = str(refusal).partition("inputs: ")[2] or str(refusal)
    try:
        with torch.no_grad():
            return {"o": attend({n: x.detach() for n, x in leaves.items()}), "gradients": why}
    except Declined as refusal:
        return str(refusal).partition("inputs: ")[2] or str(refusal)


def _outcome(function: Callable, leaves: dict[str, Any], do: Any) -> dict[str, Any]:
    import torch

    o = function(leaves)
    grads = torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype), allow_unused=True)
    found = {"o": o.detach()}
    for (name, x), grad in zip(leaves.items(), grads, strict=True):
        found[f"d_{name}"] = torch.zeros_like(x) if grad is None else grad
    return found


def _reference(x: dict[str, Any], config: Any, blocks: Any):
    from nsa.reference.nsa import nsa

    k, v = ({b: x[f"{side}_{b}"] for b in BRANCHES} for side in "kv")
    return nsa(x["q"], k, v, x["gates"], config, blocks=blocks)


def _impostor(name: str, o: Any, x: dict[str, Any], shape: Any, blocks: Any):
    """o as somebody who is wrong in that way makes it."""
    from dataclasses import replace

    import torch

    if name == "all zero":
        return torch.zeros_like(o)
    if name == "x 1.01":
        return o * 1.01
    if name == "only the first key":
        first = torch.stack([x[f"v_{b}"][:, 0] for b in BRANCHES], -1)  # [B, HKV, DV, 3]
        first = first.repeat_interleave(shape.group, 1)[:, None]
        return torch.einsum("bthg,bthdg->bthd", x["gates"], first.expand(-1, o.shape[1], *[-1] * 3))
    config = shape.config
    if name == "w + 1 keys":
        wider = replace(config, window=config.window + 1)
        return _reference(x, wider, blocks).o.detach()
    own = torch.arange(o.shape[1], device=o.device)[:, None, None] // config.select_block
    return _reference(x, config, torch.where(blocks == own, -1, blocks)).o.detach()


def _cast(leaves: dict[str, Any], dtype: Any) -> dict[str, Any]:
    return {n: x.detach().to(dtype, copy=True).requires_grad_() for n, x in leaves.items()}
