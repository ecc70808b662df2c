"""Check every backend against the definition in fp64, and prove that the rule can reject.

`hold_all` runs in a child process, where Triton's kernels can be interpreted without a GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa.attention import registry
from nsa.attention.api import nsa_attention
from nsa.attention.registry import Declined
from nsa.config import NSAConfig
from nsa.reference.nsa import BRANCHES, nsa
from workbook.lab import sweep
from workbook.lab.measure.accuracy import AccuracyError, hold
from workbook.lab.measure.attention_inputs import Drawn, draw
from workbook.lab.measure.shapes import Shape

ENTRY = "workbook.rooms.correctness.oracle:hold_all"
# Mistakes of the case study, and trivial outputs, which the rule must reject.
IMPOSTORS = ("all zero", "x 1.01", "only the first key", "w + 1 keys", "block of its own dropped")


@dataclass(frozen=True)
class Held:
    """Result of checking one implementation's tensor by the rule at one shape."""

    shape: str
    dtype: str
    who: str
    kind: str  # "backend" or "impostor"
    tensor: str  # o, d_q, d_k_cmp, ...; "" where the backend declined
    outcome: str  # "held", "red"; "declined" by a backend, "no gradient" from one
    message: str = ""
    error: float | None = None  # of the largest exact value
    limit: float | None = None  # likewise; None if it was exceeded


def measure(
    shapes: Sequence[dict[str, Any]], *, device: str = "cpu", workers: int = 1, **how: Any
) -> list[dict[str, Any]]:
    """Run `hold_all` on these shapes (Shape.to_dict()), split among up to `workers` children.

    `how`: deadline_s (120) and folder of sweep.measure. Raises RuntimeError if a child fails:
    without its oracle there is nothing to compare.
    """
    each = max(1, -(-len(shapes) // workers))
    ended = sweep.measure(
        ENTRY,
        [list(shapes[first : first + each]) for first in range(0, len(shapes), each)],
        lambda share, _: {"shapes": share, "device": device},
        workers=workers,
        env=environment(device),
        name=lambda share: f"{len(share)}-shapes",
        progress=False,
        **{"deadline_s": 120.0, **how},
    )
    for one in ended:
        if one.status != "ok":
            raise RuntimeError(f"the oracle ended as {one.status}: {one.message}\n{one.evidence}")
    return [row for one in ended for row in one.result["rows"]]


def environment(device: str) -> dict[str, str]:
    """Environment of a child: without a GPU the kernels are interpreted, one program at a time."""
    return {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}


def hold_all(spec: dict[str, Any]) -> dict[str, Any]:
    """Return {"rows": ...}: a `Held`, as a dict, per shape, implementation and tensor."""
    if spec["device"] == "cpu":
        torch.set_num_threads(1)
    rows = []
    for one in spec["shapes"]:
        shape = Shape.from_dict(one)
        drawn = draw(shape, spec["device"])
        wide = _cast(drawn.leaves(), torch.float64)
        narrow = _cast(drawn.leaves(), shape.torch_dtype)
        blocks = _reference(wide, shape.config, None).blocks
        defined = partial(_reference, config=shape.config, blocks=blocks)
        exact, same = (_outcome(lambda x, f=defined: f(x).o, x, drawn.do) for x in (wide, narrow))
        held = partial(_held, shape, same, exact)
        for name in registry.names():
            rows += held("backend", name, _backend(name, drawn, blocks))
        for name in IMPOSTORS:
            rows += held("impostor", name, {"o": _impostor(name, same["o"], narrow, shape, blocks)})
    return {"rows": [asdict(row) for row in rows]}


def _held(
    shape: Shape,
    same: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    kind: str,
    who: str,
    found: Mapping[str, Tensor | str] | str,
) -> list[Held]:
    """Compare tensors of a backend or an impostor with plain torch's and the exact ones."""
    row = partial(Held, str(shape), shape.dtype, who, kind)
    if isinstance(found, str):
        return [row("", "declined", found)]
    largest = max(float(x.abs().max()) for name, x in exact.items() if name != "o")
    rows = []
    for name, got in found.items():
        if isinstance(got, str):
            rows.append(row(name, "no gradient", got))
            continue
        size = {"dtype": shape.torch_dtype, "magnitude": 0.0 if name == "o" else largest}
        try:
            error = hold(name, got, same[name], exact[name], **size)
            rows.append(row(name, "held", "", error.worst, error.limit))
        except AccuracyError as red:
            worst = (got.double() - exact[name]).abs().max() / exact[name].abs().max()
            rows.append(row(name, "red", str(red), float(worst)))
    return rows


def _backend(name: str, drawn: Drawn, blocks: Tensor) -> dict[str, Tensor | str] | str:
    """Return o and gradients, or why it declined; if only the backward is declined, o alone."""

    def attend(x):
        given = {"blocks": blocks, "backend": name}
        return nsa_attention(x["q"], *_by_branch(x), x["gates"], drawn.shape.config, **given)

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


def _outcome(function: Callable, leaves: dict[str, Tensor], do: Tensor) -> dict[str, Tensor]:
    o = function(leaves)
    grads = torch.autograd.grad(o, list(leaves.values()), do.to(o.dtype), materialize_grads=True)
    return {"o": o.detach()} | {f"d_{n}": x for n, x in zip(leaves, grads, strict=True)}


def _reference(x: Mapping[str, Tensor], config: NSAConfig, blocks: Tensor | None):
    return nsa(x["q"], *_by_branch(x), x["gates"], config, blocks=blocks)


def _by_branch(x: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return k and v by branch."""
    return [{b: x[f"{side}_{b}"] for b in BRANCHES} for side in "kv"]


def _impostor(
    name: str, o: Tensor, x: Mapping[str, Tensor], shape: Shape, blocks: Tensor
) -> Tensor:
    """Return o with the named mistake."""
    config = shape.config
    if name == "all zero":
        return torch.zeros_like(o)
    if name == "x 1.01":
        return o * 1.01
    if name == "only the first key":
        first = torch.stack([x[f"v_{b}"][:, 0] for b in BRANCHES], -1)  # [B, HKV, DV, 3]
        return torch.einsum("bthg,bhdg->bthd", x["gates"], first.repeat_interleave(shape.group, 1))
    if name == "w + 1 keys":
        wider = replace(config, window=config.window + 1)
        return _reference(x, wider, blocks).o.detach()
    own = torch.arange(o.shape[1], device=o.device)[:, None, None] // config.select_block
    return _reference(x, config, torch.where(blocks == own, -1, blocks)).o.detach()


def _cast(leaves: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: x.detach().to(dtype, copy=True).requires_grad_() for n, x in leaves.items()}
