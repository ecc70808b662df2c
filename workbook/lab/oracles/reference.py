"""Check a call's attention against the reference, and its causality, for small sizes.

strict=True checks the values of a call as it runs; this computes the call again, in fp64.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nsa.attention import registry, witness
from nsa.attention.api import nsa_attention
from nsa.attention.inputs import Inputs, checked
from nsa.config import NSAConfig
from nsa.model.layer import NSAAttention
from nsa.reference.compress import Phi, PhiWeights
from nsa.reference.nsa import BRANCHES, Result, nsa
from workbook.lab.measure.accuracy import AccuracyError, hold

MOST = 2**25  # B HQ T T: a tensor of fp64 scores is 256 MiB, and there are several


@torch.no_grad()
def check_call(
    q: Tensor, k: Any, v: Any, gates: Tensor, config: NSAConfig, *,
    backend: str = "auto", **options: Any,
) -> str:  # fmt: skip
    """Check a call of `nsa_attention`, given its arguments, by the reference; return the backend.

    Tokens after a quarter, half and three quarters of T, and the last one, are replaced, which must
    not change any branch of an earlier query. Then each branch, and the gated sum, is checked by
    the accuracy rule with the reference's selection, and the selected branch also with its own
    where rounding cannot decide a tie. Gradients are not checked.

    Raises:
        AccuracyError: with branch, place and size of the error.
        ValueError: a call too large to recompute; Declined by the backend that was named.
    """
    inputs = checked(q, k, v, gates, config, **options)
    batch, tokens, heads = q.shape[0], inputs.tokens, q.shape[2]
    if inputs.cu_seqlens_q is not None:
        raise ValueError("packed queries with bounds of their own: check each sequence by itself")
    if batch * heads * tokens**2 > MOST:
        most = int((MOST / (batch * heads)) ** 0.5)
        raise ValueError(
            f"B={batch} x HQ={heads} x T={tokens} squared are {batch * heads * tokens**2:,} scores "
            f"a branch, too many to recompute in fp64; {most} tokens would do, and strict=True "
            "looks at the values of calls of any size"
        )
    chosen = registry.taken(backend, inputs)
    call = partial(_branches, backend=chosen.name)
    own = call(inputs)
    for name, o in own.items():
        if not bool(o.isfinite().all()):
            raise AccuracyError(f"{_place(name, chosen)}: {int((~o.isfinite()).sum())} values are "
                                f"not finite, of {o.numel()}")  # fmt: skip
    _check_causal(call, inputs, own, chosen)

    exact = _reference(_cast(inputs, torch.float64))
    given = replace(inputs, blocks=exact.blocks)
    plain = _reference(given)
    held = call(given) | {"sum": _attend(given, chosen.name)}
    for name, o in held.items():
        stick, truth = (r.o if name == "sum" else r.branches[name] for r in (plain, exact))
        hold(_place(name, chosen), o, stick, truth, dtype=q.dtype)
    if "slc" in own and inputs.blocks is None and exact.importance is not None:
        sure = _no_near_tie(exact.importance, config, q.dtype, inputs.q_start)  # [B, T, HKV]
        sure = sure.repeat_interleave(inputs.group, 2)[..., None]
        o, truth = own["slc"], exact.branches["slc"]
        o, stick = (torch.where(sure, x.double(), truth) for x in (o, plain.branches["slc"]))
        hold(f"{_place('slc', chosen)} with its own selection", o, stick, truth, dtype=q.dtype)
    return chosen.name


def check_model(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, str]:
    """Run `check_call` on every NSAAttention in one call model(*args); return {layer: backend}.

    Runs under the caller's autocast, if any. Errors name the layer's place. Raises ValueError for a
    model without such a layer.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, NSAAttention)}
    if not layers:
        raise ValueError("the model has no NSAAttention to recompute")
    found: dict[str, str] = {}

    def check(layer: NSAAttention, args: tuple, kwargs: dict, _: Any, name: str) -> None:
        given = layer.arguments(*args, **kwargs)
        with torch.autocast(given["q"].device.type, enabled=False):
            found[name] = check_call(**given, backend=layer.config.backend)

    with ExitStack() as hooks, torch.no_grad():
        for name, layer in layers.items():
            look = partial(check, name=name)
            hooks.enter_context(layer.register_forward_hook(look, with_kwargs=True))
        model(*args, **kwargs)
    return found


def _place(branch: str, backend: registry.Backend) -> str:
    what = "the gated sum" if branch == "sum" else f"branch {branch!r}"
    return f"{what} at {witness.place()} (backend {backend.name})"


def _branches(inputs: Inputs, backend: str) -> dict[str, Tensor]:
    """Output o of each requested branch, as the backend's gated sum with one-hot gates."""
    found = {}
    for index, branch in enumerate(BRANCHES):
        if branch in inputs.branches:
            gates = torch.zeros_like(inputs.gates)
            gates[..., index] = 1.0
            found[branch] = _attend(replace(inputs, gates=gates, branches=(branch,)), backend)
    return found


def _attend(inputs: Inputs, backend: str) -> Tensor:
    return nsa_attention(**_given(inputs), backend=backend)


def _reference(inputs: Inputs) -> Result:
    return nsa(**_given(inputs))


def _given(inputs: Inputs) -> dict[str, Any]:
    derived = ("places", "return_lse", "return_blocks")
    return {f.name: getattr(inputs, f.name) for f in fields(inputs) if f.name not in derived}


def _check_causal(call, inputs: Inputs, before: dict[str, Tensor], backend) -> None:
    eps = 4 * torch.finfo(inputs.q.dtype).eps
    for cut, changed in _futures(inputs):
        for branch, o in call(changed).items():
            moved = (o[:, :cut].double() - before[branch][:, :cut].double()).abs().amax((0, 2, 3))
            late = moved > eps * float(before[branch].abs().max())
            if bool(late.any()):
                t = int(late.nonzero()[0])
                raise AccuracyError(
                    f"{_place(branch, backend)}: the query at position {t} sees the future: its "
                    f"output moves by {float(moved[t]):.2e} when tokens from {cut} on change"
                )


def _futures(inputs: Inputs) -> Iterator[tuple[int, Inputs]]:
    """(first changed row, inputs) with other keys, values and queries at and after it."""
    tokens = inputs.q.shape[1]
    for cut in sorted({tokens // 4, tokens // 2, 3 * tokens // 4, tokens - 1} - {0}):

        def changed(x: Tensor, cut: int) -> Tensor:
            return torch.cat([x[:, :cut], -2 * x[:, cut:]], dim=1)

        at = inputs.q_start + cut
        sides = ({b: changed(x, at) for b, x in side.items()} for side in (inputs.k, inputs.v))
        k, v = sides
        yield cut, replace(inputs, q=changed(inputs.q, cut), k=k, v=v)


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    def weights(w: PhiWeights | None) -> PhiWeights | None:
        parts = (
            {} if w is None else {n: x if x is None else x.to(dtype) for n, x in vars(w).items()}
        )
        return PhiWeights(**parts) if parts else None

    phi = Phi(inputs.phi.kind, weights(inputs.phi.key), weights(inputs.phi.value),
              inputs.phi.rotary and tuple(x.to(dtype) for x in inputs.phi.rotary))  # fmt: skip
    k, v = ({b: x.to(dtype) for b, x in side.items()} for side in (inputs.k, inputs.v))
    cast = {"q": inputs.q.to(dtype), "k": k, "v": v, "gates": inputs.gates.to(dtype), "phi": phi}
    if inputs.compressed is not None:
        cast["compressed"] = tuple(x if x is None else x.to(dtype) for x in inputs.compressed)
    return replace(inputs, **cast)


def _no_near_tie(importance: Tensor, config: NSAConfig, dtype: torch.dtype, start: int) -> Tensor:
    """Mask [B, T, HKV]: True if the last selected block leads the first one left out by more than
    rounding can change; importance [B, T, HKV, NB] in fp64."""
    tokens, blocks = importance.shape[1], importance.shape[3]
    if blocks <= config.select_count:
        return importance.new_ones(importance.shape[:3], dtype=torch.bool)
    j = torch.arange(blocks, device=importance.device)
    position = start + torch.arange(tokens, device=importance.device)
    own = position[:, None, None] // config.select_block
    forced = (j < config.select_initial) | (j > own - config.select_local)
    ranked = importance.masked_fill(forced, torch.inf).masked_fill(j > own, -torch.inf)
    ranked = ranked.sort(-1, descending=True).values
    last, next_ = ranked[..., config.select_count - 1], ranked[..., config.select_count]
    least = 4 * torch.finfo(dtype).eps * importance.sum(-1)
    return (next_ == -torch.inf) | (last - next_ > least)
