"""Backward of the compressed and the window branch, with the gate folded in."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.blocks import Span
from nsa.kernels.common import (
    LOG2E,
    Sizes,
    axis_arguments,
    ceil_div,
    contiguous_like,
    precision,
)
from nsa.kernels.hopper import launches as hopper
from nsa.kernels.launch import launch
from nsa.kernels.sequences import Axis
from nsa.kernels.span_bwd_kernels import dkdv_kernel, dq_kernel, sum_parts
from nsa.kernels.span_common import (
    default_tile,
    descriptors_fit,
    felt,
    line_operand,
    lines_fit,
    operand,
)
from nsa.kernels.tiles import Tile, processors

TOGETHER = 4  # programs of a tile of keys: few enough for their tokens to stay in the L2 cache
LEAST_STEPS = 8  # least tiles of queries that amortize a program's start and its part's sum


def span_dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse2: Tensor,
    gates: Tensor | None,
    branch: int,
    span: Span,
    tokens: Axis,
    keys: Axis,
    scale: float,
    *,
    delta: Tensor | None = None,
    kept: Tensor | None = None,
    dgates: Tensor | None = None,
    dq: Tensor | None = None,
    tile: Tile | None = None,
    descriptors: bool | None = None,
    specialized: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(dq [tokens, HQ, D], delta [HQ, tokens] fp32) for do [tokens, HQ, DV] of the gated output.

    delta None: it is computed here, and written to dgates[..., branch] if given; that costs one
    product more. kept [HQ, tokens] fp32: sum of a query's probabilities, 1 if None; it is less if
    lse2 has a sink's term, see `sinks`. dq given: added to, in fp32; otherwise allocated in q's
    dtype. gates None: 1.
    tile, descriptors: as in span_forward. specialized: see `hopper.launches.tile_for`.
    """
    total, heads, dim = q.shape
    value_dim = v.shape[2]
    make_delta = delta is None
    if make_delta:
        delta = torch.empty(heads, total, dtype=torch.float32, device=q.device)
    add = dq is not None
    if not add:
        dq = torch.empty(total, heads, dim, dtype=q.dtype, device=q.device)
    along = span, tokens, keys
    if by_warps := hopper.tile_for("dq", specialized, *along, (q, k, v, do)):
        given = (q, k, v, do), (lse2, delta, kept), (gates, dgates, branch), dq, *along, scale
        hopper.launch_dq(*given, make_delta=make_delta, add=add, tile=tile or by_warps)
        return dq, delta
    tile = tile or default_tile("dq", value_dim, span, q)
    if descriptors is None:
        descriptors = descriptors_fit(tokens, keys, q, k, v, do)
    place, count = axis_arguments(tokens, tile.rows)
    if count:
        launch(
            dq_kernel, (count * heads,),
            operand(q, tokens, tile.rows, descriptors), operand(k, keys, tile.keys, descriptors),
            operand(v, keys, tile.keys, descriptors), v,
            operand(do, tokens, tile.rows, descriptors), lse2, delta, kept, gates, dgates, dq,
            tuple(None if x is None else x.stride() for x in (q, k, v, do, gates, dgates, dq)),
            place, (keys.bounds, keys.length), count, total, scale, scale * LOG2E,
            Sizes(heads, heads // k.shape[1], dim, value_dim), felt(span, keys), tile,
            BRANCH=branch, MAKE_DELTA=make_delta, ADD=add, PACKED=tokens.packed,
            PRECISION=precision(q), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return dq, delta


def span_dkdv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse2: Tensor,
    delta: Tensor,
    gates: Tensor | None,
    branch: int,
    span: Span,
    tokens: Axis,
    keys: Axis,
    scale: float,
    *,
    out: Sequence[Tensor] = (),
    tile: Tile | None = None,
    descriptors: bool | None = None,
    specialized: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(dk [keys, HKV, D], dv [keys, HKV, DV]), contiguous, in the dtypes of k and v, or `out`.

    With a lookback one program sums over the heads of the group; without, few keys are seen by
    many queries, so each head writes fp32 parts, which are then summed in order; likewise if there
    are fewer tiles than SMs. delta: from span_dq.
    tile, descriptors: as in span_forward. specialized: see `hopper.launches.tile_for`.
    """
    total, heads, dim = q.shape
    _, kv_heads, value_dim = v.shape
    group = heads // kv_heads
    if descriptors is None:
        descriptors = descriptors_fit(tokens, keys, q, k, v, do)
    by_warps = hopper.tile_for("dkdv", specialized, span, tokens, keys, (q, k, v, do))
    tile = tile or by_warps or default_tile("dkdv", value_dim, span, q, descriptors)
    place, count = axis_arguments(keys, tile.keys)
    each, splits = _shares(span, tokens, count * kv_heads, group, tile, q.device)
    parts = group // each * splits
    dk, dv = out or (contiguous_like(k), contiguous_like(v))
    dk_parts, dv_parts = dk[None], dv[None]
    past_end = keys.packed and keys.bounds is not tokens.bounds
    if parts > 1 or past_end:
        dk_parts = torch.empty(parts, *dk.shape, dtype=torch.float32, device=k.device)
        dv_parts = torch.empty(parts, *dv.shape, dtype=torch.float32, device=v.device)
    if not count:
        return dk, dv
    gate = None if gates is None else _as_line(gates[..., branch].t())
    lines = lines_fit(tokens, lse2, delta, gate)
    shares = each, splits, _together(span, heads // each * splits)
    if by_warps:
        given = (q, k, v, do), (lse2, delta, gate), (dk_parts, dv_parts)
        hopper.launch_dkdv(*given, span, tokens, keys, scale, shares, tile)
    else:
        launch(
            dkdv_kernel, (count * kv_heads * parts,),
            operand(q, tokens, tile.rows, descriptors), operand(k, keys, tile.keys, descriptors),
            operand(v, keys, tile.keys, descriptors), operand(do, tokens, tile.rows, descriptors),
            *(line_operand(x, tokens, tile.rows, lines) for x in (lse2, delta, gate)),
            dk_parts, dv_parts,
            (*(x.stride() for x in (q, k, v, do)),
             (*dk.stride()[:2], dk_parts.stride(0)), (*dv.stride()[:2], dv_parts.stride(0))),
            (tokens.bounds, tokens.length, tokens.starts), place, total, scale, scale * LOG2E,
            Sizes(heads, group, dim, value_dim), felt(span, keys), tile,
            EACH=shares[0], SPLITS=shares[1], TOGETHER=shares[2], PACKED=keys.packed,
            PRECISION=precision(q), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    if dk_parts.data_ptr() != dk.data_ptr():
        sums, block = max(dk.numel(), dv.numel()), 1024
        launch(
            sum_parts, (ceil_div(sums, block), 2),
            dk_parts, dv_parts, dk, dv, keys.bounds, keys.count, kv_heads * dim,
            kv_heads * value_dim, dk.numel(), dv.numel(), PARTS=parts, BLOCK=block,
        )  # fmt: skip
    return dk, dv


def _as_line(x: Tensor) -> Tensor:
    """Convert x [heads, tokens] to the format of lse2, contiguous fp32; x itself if it has it."""
    if x.dtype == torch.float32 and x.is_contiguous():
        return x
    return torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)


def _together(span: Span, programs: int) -> int:
    """Number of a tile's programs interleaved with those of other tiles that read the same tokens.

    With a lookback only neighbours share tokens, and those run concurrently anyway.
    """
    most = programs if span.lookback is not None else TOGETHER
    return max(n for n in range(1, most + 1) if programs % n == 0)


def _shares(
    span: Span, tokens: Axis, programs: int, group: int, tile: Tile, device: torch.device
) -> tuple[int, int]:
    """(each, splits): query heads of a group per program, and number of shares of their tokens.

    Many heads per program avoid parts and their sum; few programs leave the GPU idle.
    """
    wanted = processors(device)
    seen_by = tokens.length
    each = 1
    if span.lookback is not None:
        seen_by = min(seen_by, span.lookback * span.stride + tile.keys * span.stride)
        divisors = [n for n in range(1, group + 1) if group % n == 0]
        each = max((n for n in divisors if programs * (group // n) >= wanted), default=1)
    programs = max(1, programs * (group // each))
    steps = seen_by * each // tile.rows
    return each, max(1, min(-(-wanted // programs), steps // LEAST_STEPS))
