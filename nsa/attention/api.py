"""The operation: checks inputs once, computes the branches on a backend, mixes by the gates."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature

import torch
from torch import Tensor

from nsa.attention import registry, witness
from nsa.attention.branches import scored
from nsa.attention.inputs import Inputs, check_blocks, checked
from nsa.attention.span import wide
from nsa.attention.transforms import VMAP, active, without_autocast
from nsa.config import NSAConfig
from nsa.reference.compress import Phi
from nsa.reference.nsa import BRANCHES, combine, sunk

registry.backends()  # loaded now, because torch.compile cannot trace an import


def nsa_attention(
    q: Tensor,
    k: Tensor | Mapping[str, Tensor],
    v: Tensor | Mapping[str, Tensor],
    gates: Tensor,
    config: NSAConfig,
    *,
    phi: Phi | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    blocks: Tensor | None = None,
    branches: Sequence[str] = BRANCHES,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    strict: bool = False,
    q_start: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    compressed: tuple[Tensor, Tensor | None] | None = None,
    return_blocks: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Native Sparse Attention (arXiv 2502.11089, Eq. 5): o [B, T, HQ, DV] in the dtype of q.

    Args:
        q: [B, T, HQ, D] in fp32, bf16, fp16 or fp64.
        k, v: [B, T, HKV, D] and [B, T, HKV, DV], HKV a divisor of HQ; one tensor shared by the
            branches or a mapping with an entry for "cmp", "slc" and "win".
        gates: [B, T, HQ, 3], in the order cmp, slc, win.
        phi: how compressed keys and values are made; the mean of a block by default.
        cu_seqlens: [N + 1] int32 with B = 1: packed sequences, independent of each other.
        backend: a name in `registry.names()`, which runs or raises, or "auto".
        blocks: [B, T, HKV, N], ascending, -1 last: a selection to use instead of scoring one.
        branches: branches to compute; no work is done for the others, and they count as 0.
        scale: scale of the scores; D ** -0.5 by default.
        sinks: [HQ], or [HQ, 3] for the branches in that order: one more logit a softmax, without a
            key or a value, fixed or learned. Each denominator has e^sink as well, so that a head
            may attend to nothing; -inf is none. Not scaled, and blocks are selected without it.
        return_lse: (o, lse, combined) instead of o. lse [B, T, HQ, 3] has the natural log of each
            branch's sum of e^score over the keys that a query sees, as flash-attn's softmax_lse:
            -inf where it sees none or the branch is not computed. combined [B, T, HQ] is the log
            of the sum over the branches, where a key counts in each branch that sees it. fp32 (fp64
            of fp64), of keys alone whatever the sinks, and without gradient.
        strict: raise at the first non-finite branch output, gate or sum, and check `blocks`. Costs
            a device sync for each and, once per new GPU model, a comparison of kernels that were
            never run there with others. Otherwise such outputs are counted by the witness with
            one warning. `workbook.lab.oracles.reference.check_call` recomputes small calls in
            fp64.
        q_start: row of k and v at which the queries begin: q has T of their S tokens, q_start + T
            <= S, and o is rows q_start.. of the whole call. Keys after a query are not seen. None:
            T = S. Of packed sequences with cu_seqlens_q it is [N] int32, the position of the first
            query in each.
        cu_seqlens_q: [N + 1] int32, bounds of the queries if cu_seqlens has those of the keys:
            sequence n has queries q_start[n].. of its own. q_start None: the newest of each
            sequence, as in flash-attn. Without it an int q_start counts in packed rows.
        compressed: (keys [B, C, HKV, D], values [B, C, HKV, DV]), made elsewhere of all S tokens,
            to use instead of phi's; packed ones sequence after sequence. Values may be None where
            "cmp" is not computed. The "cmp" of k and v is then not read.
        return_blocks: the selection [B, T, HKV, N] as well, behind o or (o, lse, combined): int32,
            ascending, -1 last, or the `blocks` given. Of packed sequences indices are within each.

    Raises:
        ValueError: inputs do not fit together; Declined if the backend does not accept them.
        FloatingPointError: in strict mode, with the branch, layer and step.
        RuntimeError: in strict mode, if a kernel is wrong on this GPU model.
    """
    options = {"phi": phi, "cu_seqlens": cu_seqlens, "blocks": blocks}
    options |= {"sinks": sinks, "return_lse": return_lse, "q_start": q_start}
    options |= {"cu_seqlens_q": cu_seqlens_q, "compressed": compressed}
    options |= {"return_blocks": return_blocks}
    inputs = checked(q, k, v, gates, config, **options, branches=branches, scale=scale)
    if strict and VMAP in active():
        raise ValueError("vmap has no values for strict=True to look at; strict=False would do")
    if strict and blocks is not None:
        for sequence in [inputs] if cu_seqlens is None else inputs.sequences():
            check_blocks(sequence)
    chosen, declined = _backend(backend, inputs)
    if strict and not torch.compiler.is_compiling():
        chosen.first_use(inputs)
    notes: list[tuple[str, str]] = []

    def note(*of: str) -> None:
        notes.append(of)

    with without_autocast(q.device):
        if chosen.fused is None or strict:
            if return_blocks and blocks is None:
                inputs = with_blocks(inputs, chosen, note)
                blocks = inputs.blocks
            outputs, lse = branches_of(chosen, inputs, note)
            if strict:
                _check_finite({f"branch {b!r}": x for b, x in outputs.items()}, chosen.name)
            o = combine(gates, outputs).to(q.dtype)
        else:
            o, lse, own = chosen.fused(inputs, note)
            blocks = own if blocks is None else blocks
        # While torch.compile traces, nothing is computed; compiled code is not recorded.
        if not torch.compiler.is_compiling():
            witness.saw_call(chosen.name, notes, declined)
            witness.saw_output(o)
        if strict:
            _check_finite({"the gates": gates, "the gated sum": o}, chosen.name)
    found = (o, *(_lse_by_branch(inputs, lse) if return_lse else ()))
    found += (blocks,) if return_blocks else ()
    return found if len(found) > 1 else o


def explain(q, k, v, gates, config: NSAConfig, **options) -> str:
    """Return the backend that `auto` would choose for a call, and why earlier ones declined.

    `options` are those of `nsa_attention` but backend and strict. TypeError for others.
    """
    known = [*signature(checked).parameters][5:]  # behind q, k, v, gates and config
    for name in options:
        if name not in known:
            raise TypeError(
                f"explain takes no {name!r}, since it reports what backend='auto' takes: its "
                f"options are {', '.join(known)}"
            )
    return str(registry.choose(checked(q, k, v, gates, config, **options)))


def _backend(name: str, inputs: Inputs) -> tuple[registry.Backend, dict[str, list[str]]]:
    """Return the backend to run, and why the backends that `auto` prefers declined."""
    if name == "auto":
        choice = registry.choose(inputs)
        return choice.backend, choice.declined
    backend = registry.get(name)
    if reasons := "; ".join(backend.declines(inputs)):
        raise registry.Declined(f"backend {name!r} does not take these inputs: {reasons}")
    return backend, {}


def with_blocks(
    inputs: Inputs, backend: registry.Backend, note: registry.Note = lambda *_: None
) -> Inputs:
    """Inputs with the selection that this backend would score, [B, T, HKV, n] int32, and with the
    compressed keys and values that it is scored by, which are then made once."""
    blocks, given = (backend.score or scored)(inputs, note)
    return replace(inputs, blocks=blocks, compressed=given)


def branches_of(
    backend: registry.Backend, inputs: Inputs, note: registry.Note
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """(o [B, T, HQ, DV] of each branch before its gate, with sinks; lse where computed)."""
    found = (
        backend.run(inputs, note) if inputs.cu_seqlens is None else _packed(backend, inputs, note)
    )
    outputs = {b: o for b, (o, _) in found.items()}
    lse = {b: x for b, (_, x) in found.items() if x is not None}
    return outputs if backend.fused else sunk(outputs, lse, inputs.sinks), lse


def _packed(backend: registry.Backend, inputs: Inputs, note: registry.Note) -> registry.Branches:
    parts = [backend.run(sequence, note) for sequence in inputs.sequences()]
    together = {b: zip(*(part[b] for part in parts), strict=True) for b in inputs.branches}
    return {
        b: tuple(None if x[0] is None else torch.cat(x, dim=1) for x in pair)
        for b, pair in together.items()
    }


def _lse_by_branch(inputs: Inputs, lse: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Per-branch and combined log-sum-exps: ([B, T, HQ, 3], [B, T, HQ])."""
    q = inputs.q
    none = q.new_full(q.shape[:3], float("-inf"), dtype=wide(q.dtype))
    by_branch = torch.stack([lse.get(b, none).detach() for b in BRANCHES], dim=-1)
    return by_branch, by_branch.logsumexp(-1)


def _check_finite(values: Mapping[str, Tensor], backend: str) -> None:
    for name, x in values.items():
        if bad := int((~x.isfinite()).sum()):
            raise FloatingPointError(
                f"{name} at {witness.place()}: {bad} of {x.numel()} values are not finite "
                f"(backend {backend})"
            )
