"""Selection and attention as torch operators for autograd, torch.compile and export.

This module decides what to save and what to launch, in which order. A forward keeps the gated sum,
o of the compressed branch, a log-sum-exp for each branch, the selection and the tiles planned for
it. <do, o> of the window follows from the probabilities that its backward computes anyway, and that
of the selected branch is the remainder of the sum's: their outputs exist only inside the sum. If
values share an offset, these are small differences of large numbers: for 16-bit inputs the sum
keeps 8 more bits, and intermediate sums are in fixed point. All sums are in a fixed order: the same
inputs give the same bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.blocks import compressed_span, window_span
from nsa.config import NSAConfig
from nsa.kernels import (
    combine,
    inverse,
    selected_dkdv,
    selected_dq,
    selected_fwd,
    selected_plan,
    span_bwd,
    span_fwd,
    topk,
)
from nsa.kernels.common import LOG2E, contiguous_like
from nsa.kernels.registration import contiguous, operator, sequences_at
from nsa.kernels.sequences import Sequences
from nsa.kernels.side_stream import SideStream
from nsa.kernels.sinks import sink_gradients, sunk_rows

CMP, SLC, WIN = range(3)  # index of a branch's gate


@operator("select")
def select(
    q: Tensor,
    k_cmp: Tensor,
    cu_seqlens: Tensor | None,
    batch: int,
    sizes: Sequence[int],
    scale: float,
    starts: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    key_tokens: int | None = None,
) -> Tensor:
    """blocks [tokens, HKV, n] int32 (Eq. 8-11); no gradient flows through it."""
    sequences = sequences_at(q.shape[0], cu_seqlens, batch, sizes, starts, cu_seqlens_q, key_tokens)
    return topk.select_blocks(q, k_cmp, _lse(q, k_cmp, sequences, scale), sequences, scale)


@select.register_fake
def _(q, k_cmp, cu_seqlens, batch, sizes, *_):
    slots = q.shape[0], k_cmp.shape[1], NSAConfig(*sizes).select_count
    return q.new_empty(slots, dtype=torch.int32)


def _intermediate(q: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """Empty tensors for an intermediate sum [tokens, HQ, width] and its unit [HQ, tokens].

    For bf16 it is in fixed point, see `common.fixed_point`. For fp16 and fp32 it is fp32 without
    a unit: 15 bits would be only 4 more than those of fp16.
    """
    tokens, heads = q.shape[:2]
    if q.dtype != torch.bfloat16:
        return q.new_empty(tokens, heads, width, dtype=torch.float32), None
    unit = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    return q.new_empty(tokens, heads, width, dtype=torch.int16), unit


def _lse(q: Tensor, k_cmp: Tensor, sequences: Sequences, scale: float) -> Tensor:
    """lse2 of the compressed branch without its output."""
    span = compressed_span(sequences.config)
    axes = sequences.queries, sequences.compressed
    return span_fwd.span_forward(q, k_cmp, None, span, *axes, scale)[1]


@operator("attend")
def attend(
    q: Tensor,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    k_slc: Tensor | None,
    v_slc: Tensor | None,
    k_win: Tensor | None,
    v_win: Tensor | None,
    gates: Tensor | None,
    sinks: Tensor | None,
    blocks: Tensor | None,
    cu_seqlens: Tensor | None,
    batch: int,
    sizes: Sequence[int],
    scale: float,
    keep: bool,
    starts: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    key_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gated sum (Eq. 5) of the branches whose values are given, and tensors for its backward.

    Args:
        q: [tokens, HQ, D].
        k_cmp, v_cmp: [C rows, HKV, *]; k_slc, v_slc, k_win, v_win: [tokens, HKV, *].
        gates: [tokens, HQ, 3], or None for one branch alone, not gated.
        sinks: [HQ, 3] fp32, the logit of each softmax that has no value; None for none.
        blocks: [tokens, HKV, N], a selection made by the caller; else scored against k_cmp.
        cu_seqlens: [N + 1] for packed sequences; else `batch` sequences of one length.
        sizes: sizes of the config, see `registration.sizes_of`.
        keep: True if a backward may follow, or a log-sum-exp is requested.
        starts, cu_seqlens_q, key_tokens: see `registration.sequences_at`; k_slc and so on then have
            key_tokens rows.

    Returns (o [tokens, HQ, DV], o of the compressed branch and its unit, see `_intermediate`, the
    `common.rest_of` the sum, lse2 [HQ, tokens] of the compressed and of the window branch, lse2
    [tokens, HQ] of the selected one, all of keys alone, its plan, see `selected_plan.Plan`, int32,
    blocks); tensors not kept are empty. A backward reads o: it must not be changed in place.
    """
    sequences = sequences_at(q.shape[0], cu_seqlens, batch, sizes, starts, cu_seqlens_q, key_tokens)
    config, tokens, queries = sequences.config, sequences.tokens, sequences.queries
    kept = {name: q.new_empty(0, dtype=dtype) for name, dtype in _kept(q.dtype).items()}
    o, lse_cmp, mix = None, None, {}
    sink2 = (None,) * 3 if sinks is None else (sinks * LOG2E).t().contiguous().unbind()
    if v_cmp is not None:
        span = compressed_span(config), queries, sequences.compressed, scale
        o_cmp, unit = _intermediate(q, v_cmp.shape[2])
        _, lse_cmp = span_fwd.span_forward(
            q, k_cmp, v_cmp, *span, out=o_cmp, out_unit=unit, sink2=sink2[CMP]
        )
        if keep:
            kept |= {"o_cmp": o_cmp, "lse_cmp": lse_cmp} | ({} if unit is None else {"unit": unit})
        elif unit is not None or q.dtype == torch.float32:
            o = o_cmp.view(q.dtype)  # its memory is reused for the sums
        mix = {"base": o_cmp, "base_unit": unit, "base_branch": CMP}
    if o is None and not (v_win is None and v_slc is None):
        o = q.new_empty(*q.shape[:2], (v_slc if v_win is None else v_win).shape[2])
    side = SideStream(q)  # the window beside the scores
    if v_win is not None:
        lse_win = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        out, win_unit = o, None
        if v_slc is not None and q.dtype == torch.bfloat16:
            out, win_unit = o.view(torch.int16), torch.empty_like(lse_win)
        elif v_slc is not None and q.dtype == torch.float16:
            out = torch.empty_like(o, dtype=torch.float32)
        given = q, k_win, v_win, window_span(config), queries, tokens, scale
        room = {"out": out, "out_unit": win_unit, "lse2": lse_win, "sink2": sink2[WIN]}
        with side:
            span_fwd.span_forward(*given, gates=gates, branch=WIN, **room, **mix)
        mix = {"base": out, "base_unit": win_unit}
        if keep:
            kept["lse_win"] = lse_win
    if v_slc is not None:
        if blocks is None:
            lse = _lse(q, k_cmp, sequences, scale) if lse_cmp is None else lse_cmp
            blocks = topk.select_blocks(q, k_cmp, lse, sequences, scale)
            if keep:
                kept["blocks"] = blocks
        plan = selected_plan.plan(blocks, sequences, q.shape[1] // k_slc.shape[1])
        if keep and q.dtype != torch.float32:
            kept["rest"] = torch.empty_like(o, dtype=torch.int8)
        side.join()
        _, lse_slc = selected_fwd.selected_forward(
            q, k_slc, v_slc, plan, sequences, scale, gates=gates, branch=SLC, out=o,
            rest=kept["rest"] if kept["rest"].numel() else None, sink2=sink2[SLC], **mix,
        )  # fmt: skip
        if keep:
            kept |= {"lse_slc": lse_slc, "plan": plan.workspace}
    side.join()
    if v_win is None and v_slc is None:
        o = o_cmp if unit is None else o_cmp * unit.t()[..., None]
        o = o if gates is None else o * gates[..., CMP, None]
        # An operator's results must not share memory.
        o = o.clone() if o is o_cmp and keep else o.to(q.dtype)
    return o, *kept.values()


def _kept(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Names and dtypes of the results of `attend` except o, in order, for q of this dtype."""
    o_cmp = torch.int16 if dtype == torch.bfloat16 else torch.float32
    kept = {"o_cmp": o_cmp, "unit": torch.float32, "rest": torch.int8}
    kept |= dict.fromkeys(("lse_cmp", "lse_win", "lse_slc"), torch.float32)
    return kept | dict.fromkeys(("plan", "blocks"), torch.int32)


@attend.register_fake
def _(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, sinks, blocks, cu_seqlens, *plain):
    batch, sizes, _, keep, *offset = plain
    v = next(x for x in (v_cmp, v_slc, v_win) if x is not None)
    tokens, heads = q.shape[:2]
    o = q.new_empty(tokens, heads, v.shape[2])
    slots = tokens, v.shape[1], NSAConfig(*sizes).select_count
    planned = 0
    if v_slc is not None:
        each = slots[1:] if blocks is None else blocks.shape[1:]
        offset = offset or (None,) * 3
        axis = sequences_at(tokens, cu_seqlens, batch, sizes, *offset).queries
        planned = selected_plan.layout_of(axis, *each, heads // each[0]).elements()
    shapes = {
        "o_cmp": (v_cmp is not None, o.shape),
        "unit": (v_cmp is not None and q.dtype == torch.bfloat16, (heads, tokens)),
        "rest": (v_slc is not None and q.dtype != torch.float32, o.shape),
        "lse_cmp": (v_cmp is not None, (heads, tokens)),
        "lse_win": (v_win is not None, (heads, tokens)),
        "lse_slc": (v_slc is not None, (tokens, heads)),
        "plan": (v_slc is not None, (planned,)),
        "blocks": (v_slc is not None and blocks is None, slots),
    }
    dtypes = _kept(q.dtype)
    return o, *(
        q.new_empty(shape if keep and wanted else (0,), dtype=dtypes[name])
        for name, (wanted, shape) in shapes.items()
    )


def _empty_gradients(
    q: Tensor, branches: Sequence[tuple[Tensor | None, Tensor | None]], keys: bool
) -> list[Tensor]:
    """Empty gradients of each branch's k and v; without elements if absent or not `keys`."""
    return [
        contiguous_like(x) if keys and v is not None else q.new_empty(0)
        for k, v in branches
        for x in (k, v)
    ]


@operator("attend_backward")
def attend_backward(
    do: Tensor,
    q: Tensor,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    k_slc: Tensor | None,
    v_slc: Tensor | None,
    k_win: Tensor | None,
    v_win: Tensor | None,
    gates: Tensor | None,
    sinks: Tensor | None,
    blocks: Tensor | None,
    cu_seqlens: Tensor | None,
    o: Tensor,
    o_cmp: Tensor,
    unit: Tensor,
    rest: Tensor,
    lse_cmp: Tensor,
    lse_win: Tensor,
    lse_slc: Tensor,
    plan: Tensor,
    batch: int,
    sizes: Sequence[int],
    scale: float,
    keys: bool,
    starts: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    key_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk_cmp, dv_cmp, dk_slc, dv_slc, dk_win, dv_win, dgates, dsinks) of `attend`.

    Gradients of arguments that were not given are empty, and of keys and values unless `keys`.
    """
    sequences = sequences_at(q.shape[0], cu_seqlens, batch, sizes, starts, cu_seqlens_q, key_tokens)
    config, tokens, queries = sequences.config, sequences.tokens, sequences.queries
    dgates = None
    if gates is not None:
        whole = None not in (v_cmp, v_slc, v_win)
        make = torch.empty if whole else torch.zeros
        dgates = make(gates.shape, dtype=gates.dtype, device=gates.device)
        # One copy, fp32 and contiguous by token, for every kernel that walks over tokens.
        by_branch = gates.permute(2, 1, 0)
        by_branch = by_branch.to(torch.float32, memory_format=torch.contiguous_format)
        gates = by_branch.contiguous().permute(2, 1, 0)
    # Queries' gradients follow each other here, keys' and values' on a stream beside them. Each
    # delta has its own name, since that stream may read it until both are joined.
    side, dq, deltas = SideStream(q), None, []
    rows = sunk_rows(sinks, lse_cmp, lse_slc, lse_win)
    grads = _empty_gradients(q, ((k_cmp, v_cmp), (k_slc, v_slc), (k_win, v_win)), keys)
    if v_slc is not None:
        planned = selected_plan.kept_plan(plan, blocks, sequences, q.shape[1] // k_slc.shape[1])
        if keys:
            with side:
                lookup = inverse.inverse(blocks, sequences)
    if v_cmp is not None:
        span = compressed_span(config), queries, sequences.compressed, scale
        unit = unit if unit.numel() else None
        delta_cmp = combine.delta_of(do, o_cmp, dgates, CMP, unit)
        given = q, k_cmp, v_cmp, do, rows[CMP].lse2
        if keys:
            with side:
                span_bwd.span_dkdv(*given, delta_cmp, gates, CMP, *span, out=grads[0:2])
        dq, _ = span_bwd.span_dq(*given, gates, CMP, *span, delta=delta_cmp)
        deltas.append((delta_cmp, CMP))
    if v_win is not None:
        span = window_span(config), queries, tokens, scale
        given = q, k_win, v_win, do, rows[WIN].lse2
        dq, delta_win = span_bwd.span_dq(
            *given, gates, WIN, *span, kept=rows[WIN].kept, dgates=dgates, dq=dq
        )
        deltas.append((delta_win, WIN))
        if keys:
            with side:
                span_bwd.span_dkdv(*given, delta_win, gates, WIN, *span, out=grads[4:6])
    if v_slc is not None:
        given = q, k_slc, v_slc, do, rows[SLC].lse2
        dq, delta_slc = selected_dq.selected_dq(
            *given, gates, SLC, planned, sequences, scale,
            o=o, rest=rest if rest.numel() else None, others=deltas, kept=rows[SLC].kept,
            dgates=dgates, dq=dq,
        )  # fmt: skip
        deltas.append((delta_slc.t(), SLC))
        if keys:
            with side:
                selected_dkdv.selected_dkdv(
                    *given, delta_slc, gates, SLC, lookup, sequences, scale, out=grads[2:4]
                )
    side.join()
    dsinks = q.new_empty(0) if sinks is None else sink_gradients(sinks, gates, rows, deltas)
    return dq, *grads, q.new_empty(0) if dgates is None else dgates, dsinks


@attend_backward.register_fake
def _(do, q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, sinks, *rest):
    keys = rest[13]
    grads = _empty_gradients(q, ((k_cmp, v_cmp), (k_slc, v_slc), (k_win, v_win)), keys)
    dgates = q.new_empty(0) if gates is None else gates.new_empty(gates.shape)
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), *grads, dgates, dsinks


def _save_attend(ctx, inputs, output):
    *tensors, blocks, cu_seqlens, ctx.batch, ctx.sizes, ctx.scale, _ = inputs[:15]
    starts, cu_seqlens_q, ctx.key_tokens = inputs[15:] or (None,) * 3
    ctx.count = len(inputs)
    o, *kept, scored = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept, scored)
    blocks = scored if blocks is None else blocks
    ctx.save_for_backward(*tensors, blocks, cu_seqlens, o, *kept, starts, cu_seqlens_q)


def _backward_attend(ctx, do, *_):
    none = (None,) * ctx.count
    if do is None:
        return none
    *saved, starts, cu_seqlens_q = ctx.saved_tensors
    gates, keys = saved[7], any(ctx.needs_input_grad[1:7])
    do = contiguous(do)
    offset = () if starts is None else (starts, cu_seqlens_q, ctx.key_tokens)
    plain = ctx.batch, ctx.sizes, ctx.scale, keys, *offset
    dq, *grads, dgates, dsinks = attend_backward(do, *saved, *plain)
    # Keys that were scored but not attended to have no gradient: their branch has no values.
    values = saved[2], saved[2], saved[4], saved[4], saved[6], saved[6]
    used = [x if keys and v is not None else None for x, v in zip(grads, values, strict=True)]
    dgates, dsinks = (None if x is None else dx for x, dx in ((gates, dgates), (saved[8], dsinks)))
    return dq, *used, dgates, dsinks, *none[9:]


attend.register_autograd(_backward_attend, setup_context=_save_attend)
