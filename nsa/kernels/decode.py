"""One decode step with a cache: append the new tokens and attend, in at most four launches.

append (and phi), score (compressed attention and importance), choose (top n), attend (selected,
window, gated sum). Grids depend on the cache's capacity and the batch only: nothing is read back,
so a step can be captured in a CUDA graph while sequences grow.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.blocks import compressed_span, count_compressed, count_selectable
from nsa.config import NSAConfig
from nsa.kernels.common import (
    LOG2E,
    Sizes,
    ceil_div,
    next_power_of_two,
    power_of_two,
    precision,
)
from nsa.kernels.decode_append import Rows, append
from nsa.kernels.decode_attend import attend
from nsa.kernels.decode_choose import choose
from nsa.kernels.decode_common import Tuning
from nsa.kernels.decode_score import score
from nsa.kernels.launch import launch, prepared
from nsa.kernels.registration import contiguous, on_its_device
from nsa.kernels.tiles import architecture, processors

NEW_TOKENS = 16  # of a sequence, at most, in one call
SHARED_KIB = 128  # maximum shared memory of a tile's keys and values
FORMATS = (torch.float32, torch.bfloat16, torch.float16)


class Call(NamedTuple):
    """Inputs of the tuning of a step. `capacity` is in tokens; 16-bit if not wide."""

    batch: int
    kv_heads: int
    group: int
    dim: int
    value_dim: int
    new: int
    capacity: int
    config: NSAConfig
    wide: bool  # fp32
    chip: int  # 90, 80, ...
    processors: int
    paged: bool = False  # more than one page per sequence


def declined(
    config: NSAConfig, dim: int, value_dim: int, dtype: torch.dtype, new: int = 1
) -> list[str]:
    """Reasons why `decode` does not support such sizes; empty if it does."""
    reasons = []
    if new > NEW_TOKENS:
        reasons.append(f"{new} new tokens in one call: at most {NEW_TOKENS}")
    if dtype not in FORMATS:
        reasons.append(f"dtype {dtype}: fp32, bf16 and fp16 have kernels")
    if max(dim, value_dim) > 256:
        reasons.append(f"head dims {dim} and {value_dim}: at most 256")
    strides = config.select_block // config.compress_stride
    if strides > 128:
        reasons.append(f"select_block holds {strides} compress_strides: at most 128")
    width = power_of_two(dim) + power_of_two(value_dim)
    kib = power_of_two(strides) * width * dtype.itemsize / 1024
    if kib > SHARED_KIB:
        reasons.append(f"a select_block of compressed rows takes {kib:.0f} KiB: {SHARED_KIB} fit")
    return reasons


def _splits(units: int, most: int, slots: int) -> int:
    """Number of splits of `units` programs that evenly fill a GPU running `slots` at once."""
    best, filled = 1, 0.0
    for splits in range(1, max(1, min(most, 2 * slots)) + 1):
        programs = units * splits
        share = programs / (ceil_div(programs, slots) * slots)
        if share > 1.04 * filled:
            best, filled = splits, share
        if filled > 0.92:
            break
    return best


@lru_cache(maxsize=256)
def tuning(call: Call) -> Tuning:
    """Tiles and splits of a step.

    Measured on an H200 with Triton 3.6 at the paper's sizes, bf16, 4 KV heads of 16 query heads;
    docs/log.md has the numbers.
    """
    config, wide = call.config, max(power_of_two(call.dim), power_of_two(call.value_dim))
    rows = min(64, power_of_two(call.new * call.group))
    strides = config.select_block // config.compress_stride
    keys = 32 if call.wide or wide > 128 else 64
    score_keys = max(keys, power_of_two(strides))
    tile = score_keys // strides * strides
    units = call.batch * call.kv_heads
    tiles = ceil_div(max(1, count_compressed(call.capacity, config)), tile)
    slots = 2 * call.processors
    row_tiles = ceil_div(call.new * call.group, rows)
    selected = config.select_count * config.select_block
    blocks = next_power_of_two(max(2, count_selectable(call.capacity, config)))
    choose_blocks = max(min(blocks, 1024), next_power_of_two(score_keys // strides + 1) // 2)
    slc = _splits(units * call.new, ceil_div(selected + config.window, 2 * keys), slots)
    # Both branches in one program, or a share of the splits for each.
    slc_share = max(1, round(slc * selected / (selected + config.window)))
    few = max(power_of_two(call.group), rows) <= 32 and not call.wide and call.chip >= 90
    # A processor for every program of `attend`, or several programs for every processor.
    alone = units * call.new * slc <= call.processors
    crowd = units * call.new >= 4 * call.processors and slc == 1
    score_splits = _splits(units * row_tiles, min(tiles, 32), slots)
    # Registers of more rows a thread: not where pages are looked up, nor where warps are few.
    thin = few and not call.paged and units * row_tiles * score_splits > call.processors
    attend_warps, stages = 4, 3 if few and (slc <= 2 or alone) else 2
    if keys == 64 and call.group <= 16:
        if alone:
            attend_warps = 8
        elif crowd or slc > 2:
            keys, attend_warps, stages = 32, 2, 3
    idle = 2 * units * call.new <= call.processors  # two SMs or more per ranking program
    return Tuning(
        score_rows=rows,
        score_keys=score_keys,
        score_splits=score_splits,
        score_warps=2 if thin else 4,
        score_stages=3 if few else 2,
        choose_blocks=choose_blocks,
        choose_warps=min(16 if idle else 8, max(1, choose_blocks // (64 if idle else 128))),
        attend_keys=keys,
        selected_splits=min(slc_share, ceil_div(selected, keys)),
        window_splits=min(max(1, slc - slc_share), ceil_div(config.window, keys)),
        attend_warps=attend_warps,
        attend_stages=stages,
        dependent=call.chip >= 90 and 8 * units * call.new <= call.processors,
    )


def _by_branch(x: Tensor | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return x if isinstance(x, Mapping) else {"cmp": x, "slc": x, "win": x}


@on_its_device
@prepared
def decode(
    q: Tensor,
    k: Tensor | Mapping[str, Tensor],
    v: Tensor | Mapping[str, Tensor],
    gates: Tensor,
    *,
    k_slc: Tensor | None,
    v_slc: Tensor | None,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    k_win: Tensor | None,
    v_win: Tensor | None,
    k_raw: Tensor | None,
    v_raw: Tensor | None,
    table: Tensor,
    lengths: Tensor,
    config: NSAConfig,
    counts: Tensor | None = None,
    phi: str = "mean",
    phi_key=None,
    phi_value=None,
    rotary: tuple[Tensor, Tensor] | None = None,
    branches=("cmp", "slc", "win"),
    scale: float | None = None,
    sinks: Tensor | None = None,
    given: Tensor | None = None,
    selection: Tensor | None = None,
    out: Tensor | None = None,
    tuned: Tuning | None = None,
) -> Tensor:
    """Append new tokens to a cache and attend from them (Eq. 3-12): o [B, N, HQ, DV].

    Args:
        q: [B, N, HQ, D], N at most 16: the tokens at positions lengths[b] .. lengths[b] + N - 1.
        k, v: [B, N, HKV, D] and [B, N, HKV, DV], or one for each of "cmp", "slc" and "win".
        gates: [B, N, HQ, 3].
        k_slc, v_slc: [P, page, HKV, *]; position t of sequence b is on page table[b, t // page].
        k_cmp, v_cmp: [P, page / d, HKV, *]: compressed block i is on the page of its first token.
        k_win, v_win: [B, R, HKV, *], position t at t % R; None: the window reads k_slc, v_slc.
        k_raw, v_raw: [B, S, HKV, *]: inputs of phi, position t at t % S.
        table: [B, pages] int32; an invalid page is neither read nor written.
        lengths: [B] int32: tokens held before. Not advanced here.
        counts: [B] int32: how many of the N rows are real; others are not stored, and their o is 0.
        phi, phi_key, phi_value: "mean", "linear" or "mlp", with the weights' tensors as attributes
            (`nsa.reference.compress.PhiWeights`). rotary: (cos, sin) tables [positions, D / 2].
        branches: branches to compute; a cache need not have the tensors of others.
        sinks: [HQ, 3] fp32, a logit without a value for each softmax.
        given: [B, N, HKV, n] int32: blocks to attend to; none are then scored and ranked.
        selection: [B, N, HKV, n] int32, receives the blocks that are.
        out: receives o; contiguous. tuned: `tuning` of the call by default.

    Values on the GPU are not checked. A key past the capacity is not stored.
    """
    batch, new, heads, dim = q.shape
    scored, chosen, windowed = ("cmp" in branches), ("slc" in branches), ("win" in branches)
    kept = next(x for x in (k_slc, k_win, k_cmp) if x is not None)
    values = next(x for x in (v_slc, v_win, v_cmp) if x is not None)
    kv_heads, value_dim = kept.shape[2], values.shape[3]
    group, stride = heads // kv_heads, config.compress_stride
    if reasons := declined(config, dim, value_dim, q.dtype, new):
        raise ValueError("decode: " + "; ".join(reasons))
    for name, ring, needed in (
        ("win", k_win, config.window - 1),
        ("raw", k_raw, config.compress_block),
    ):
        if ring is not None and ring.shape[1] < needed + new:
            raise ValueError(
                f"k_{name} keeps {ring.shape[1]} tokens of a sequence; {new} new ones need "
                f"{needed + new}"
            )
    page = k_slc.shape[1] if k_slc is not None else 0
    if not page and k_cmp is not None:
        page = k_cmp.shape[1] * stride
    columns = table.shape[1]
    capacity = columns * page if page else 2**31 - 1 - NEW_TOKENS
    pool = next((x.shape[0] for x in (k_slc, k_cmp) if x is not None), 0)
    device = q.device
    tuned = tuned or tuning(
        Call(
            batch,
            kv_heads,
            group,
            dim,
            value_dim,
            new,
            columns * page,
            config,
            q.dtype == torch.float32,
            architecture(device),
            processors(device),
            columns > 1,
        )
    )
    o = (
        out
        if out is not None
        else torch.empty(batch, new, heads, value_dim, dtype=q.dtype, device=device)
    )
    if not batch or not new:
        return o
    q, gates = contiguous(q), contiguous(gates)
    k, v = _by_branch(k), _by_branch(v)
    per_page = None if columns <= 1 else page
    pages = table, columns, pool
    scale2 = (dim**-0.5 if scale is None else scale) * LOG2E
    sizes, span = Sizes(heads, group, dim, value_dim), compressed_span(config)
    options = {"DEPENDENT": tuned.dependent}
    if tuned.dependent:
        options["launch_pdl"] = True
    units = batch * kv_heads * new
    rows = units * group
    arrived = torch.empty(units, dtype=torch.int32, device=device)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    _append(
        k, v, (k_slc, k_win, k_raw), (v_slc, v_win, v_raw), (k_cmp, v_cmp), pages, page, per_page,
        lengths, counts, capacity, arrived, config, span, phi, (phi_key, phi_value), rotary,
        (batch, new, kv_heads, dim, value_dim), options,
    )  # fmt: skip

    o_cmp = blocks = found = None
    splits = 0
    ranked = chosen and given is None
    if given is not None:
        blocks = given.transpose(1, 2).contiguous()
    cmp_page = None if per_page is None else page // stride
    if scored or ranked:
        per_block = config.select_block // stride
        per_tile = next_power_of_two(tuned.score_keys // per_block + 1) // 2
        tiles = ceil_div(max(1, count_compressed(capacity, config)), per_tile * per_block)
        splits = min(tuned.score_splits, tiles)
        ranking = None
        if ranked:
            tables = (rows, tiles * per_tile), (rows, tiles), (rows, tiles), (rows,)
            ranking = tuple(floats(*shape) for shape in tables)
        parts = floats(rows, splits), floats(rows, splits), None
        if scored:
            o_cmp = floats(rows, value_dim)
            if splits > 1:
                parts = *parts[:2], floats(rows, splits, value_dim)
        found = parts[:2]
        row_tiles = ceil_div(new * group, tuned.score_rows)
        launch(
            score, (batch * kv_heads * row_tiles, splits),
            q, q.stride()[:3], k_cmp, v_cmp if scored else None, *pages, page // stride, lengths,
            counts, new, capacity, scale2, ranking, parts, o_cmp, tiles,
            SIZES=sizes, CONFIG=config, SPAN=span, PER_PAGE=cmp_page, M=tuned.score_rows,
            KEYS=tuned.score_keys, BLOCKS=per_tile, SPLITS=splits, PRECISION=precision(q),
            num_warps=tuned.score_warps, num_stages=tuned.score_stages, **options,
        )  # fmt: skip
        ranks = units if ranked else 0
        width = next_power_of_two(splits) * power_of_two(value_dim)
        at_once = max(1, min(16, min(4096, 1024 * tuned.choose_warps) // width))
        sums = ceil_div(rows, at_once) if scored and splits > 1 else 0
        if ranked:
            blocks = torch.empty(units, config.select_count, dtype=torch.int32, device=device)
        if ranks + sums:
            slots = max(2, next_power_of_two(config.select_count))
            launch(
                choose, (ranks + sums,),
                ranking, parts, blocks if ranked else None, o_cmp if sums else None, ranks, rows,
                lengths, counts, new, capacity, tiles,
                SIZES=sizes, CONFIG=config, SPAN=span, BLOCKS=per_tile,
                TILES=max(1, max(tuned.choose_blocks, slots) // per_tile), SPLITS=splits,
                SLOTS=slots,
                GROUP=next_power_of_two(group), ROWS=at_once, num_warps=tuned.choose_warps,
                **options,
            )  # fmt: skip

    selected = tuned.selected_splits if chosen else 0
    window = tuned.window_splits if windowed else 0
    whole = selected + window <= 2 if selected and window else selected + window <= 1
    parts = None
    if not whole:
        count = selected + window
        parts = floats(rows, count), floats(rows, count), floats(rows, count, value_dim)
    ringed = k_win is not None
    sink2 = None if sinks is None else (sinks * LOG2E).t().contiguous()
    if sinks is None:
        found, splits = None, 0
    launch(
        attend, (units, 1 if whole else selected + window),
        q, q.stride()[:3], gates, gates.stride(), (k_slc, v_slc) if selected else None,
        (k_win if ringed else k_slc, v_win if ringed else v_slc) if window else None,
        *pages, page, k_win.shape[1] if ringed else 0, blocks, o_cmp,
        found, sink2, parts, arrived, o, lengths, counts, new, capacity, scale2,
        SIZES=sizes, CONFIG=config, PER_PAGE=per_page, RING=ringed, GROUP=power_of_two(group),
        KEYS=tuned.attend_keys, SELECTED=selected, WINDOW=window, SCORED=splits, WHOLE=whole,
        PRECISION=precision(q), num_warps=tuned.attend_warps, num_stages=tuned.attend_stages,
        **options,
    )  # fmt: skip
    if ranked and selection is not None:  # not before `attend`, which follows `choose` closely
        selection.copy_(blocks.view(batch, kv_heads, new, -1).transpose(1, 2))
    return o


def _append(
    k, v, k_caches, v_caches, compressed, pages, page, per_page, lengths, counts, capacity,
    arrived, config, span, phi, weights, rotary, sizes, options,
) -> None:  # fmt: skip
    """Run the first launch. Pairs of caches are in the order slc, win, raw; None for one unused."""
    batch, new, kv_heads, dim, value_dim = sizes
    names = "slc", "win", "cmp"

    def given(x, caches):
        return tuple(
            contiguous(x[name]) if cache is not None else None
            for name, cache in zip(names, caches, strict=True)
        )

    fresh = given(k, k_caches), given(v, v_caches)
    strides = tuple(tuple(None if x is None else x.stride()[:3] for x in side) for side in fresh)
    rings = tuple(0 if x is None else x.shape[1] for x in k_caches[1:])
    half = max(ceil_div(dim, 2), ceil_div(value_dim, 2))
    columns, parts, hidden, warps = power_of_two(half), 1, 0, 4
    tensors = None, None
    if phi != "mean" and compressed[0] is not None:
        names = "position", "weight1", "bias1", "weight2", "bias2"
        tensors = tuple(
            tuple(None if (x := getattr(side, name)) is None else x.contiguous() for name in names)
            for side in weights
        )
        if phi == "linear":
            columns = 16
            parts = ceil_div(half, columns)
        else:
            hidden, warps = weights[0].weight1.shape[2], 8
    if rotary is not None:
        cos, sin = (x.contiguous() for x in rotary)
        rotary = cos, sin, cos.shape[0]
    ends = ceil_div(new, config.compress_stride) if compressed[0] is not None else 1
    launch(
        append, (batch * kv_heads, ends * parts, 2),
        fresh, strides, (k_caches, v_caches), compressed, tensors, rotary, *pages, page, rings,
        lengths, counts, new, capacity, arrived,
        CONFIG=config, SPAN=span,
        KEYS=Rows(kv_heads, dim, per_page), VALUES=Rows(kv_heads, value_dim, per_page),
        KIND=phi, HIDDEN=hidden, COLUMNS=columns, PARTS=parts, NEW=next_power_of_two(new),
        LENGTHS=next_power_of_two(config.compress_block), num_warps=warps, **options,
    )  # fmt: skip
