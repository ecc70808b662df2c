"""Warp-specialized dk and dv of the compressed and the window branch."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.kernels.common import position_of
from nsa.kernels.hopper.parts import let_by, once, ring, room, store
from nsa.kernels.span_common import key_part, seen_by, sees


@gluon.jit
def _steps(head, tiles, step_begin, step_end):
    """Steps of a program's share, with `tiles` per head, that belong to `head`."""
    low = gl.maximum(step_begin - head * tiles, 0)
    return low, gl.maximum(gl.minimum(step_end - head * tiles, tiles), low)


@gluon.jit
def _fetch(
    q, k, v, do, lse2, delta, gate, held, heads, place, EACH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Producer warp: fetch both halves of keys and values, then a stage of queries per step."""
    k_at, v_at, q_at, do_at, lines_at, loaded, full, empty = held
    sequence, kv_head, first_head = heads
    first, begin, tiles, step_begin, step_end = place
    M: gl.constexpr = q.block_shape[2]
    half: gl.constexpr = k.block_shape[2]
    LINES: gl.constexpr = 2 if gate is None else 3
    mbarrier.expect(loaded, 2 * half * (k.block_shape[3] + v.block_shape[3]) * 2)
    for side in gl.static_range(2):
        row = first + side * half
        tma.async_copy_global_to_shared(k, [sequence, kv_head, row, 0], loaded, k_at.index(side))
        tma.async_copy_global_to_shared(v, [sequence, kv_head, row, 0], loaded, v_at.index(side))
    n = 0
    for number in range(EACH):
        low, high = _steps(number, tiles, step_begin, step_end)
        head = first_head + number
        for step in range(low, high):
            row = begin + step * M
            stage = n % STAGES
            mbarrier.wait(empty.index(stage), (n // STAGES + 1) & 1)
            bar = full.index(stage)
            bytes_each: gl.constexpr = M * ((q.block_shape[3] + do.block_shape[3]) * 2 + LINES * 4)
            mbarrier.expect(bar, bytes_each)
            where = [sequence, head, row, 0]
            line = [head, sequence, row]
            at = stage * (lines_at.shape[0] // STAGES)
            tma.async_copy_global_to_shared(q, where, bar, q_at.index(stage))
            tma.async_copy_global_to_shared(do, where, bar, do_at.index(stage))
            tma.async_copy_global_to_shared(lse2, line, bar, lines_at.index(at))
            tma.async_copy_global_to_shared(delta, line, bar, lines_at.index(at + 1))
            if gate is not None:
                tma.async_copy_global_to_shared(gate, line, bar, lines_at.index(at + 2))
            n += 1


@gluon.jit
def _sum_keys(
    held, dk, dv, out_strides, place, ends, scales,
    SIDE: gl.constexpr, SPAN: gl.constexpr, EACH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: dk and dv of its half of the keys. Scores are [keys, tokens]."""
    k_at, v_at, q_at, do_at, lines_at, loaded, full, empty = held
    first, tile_begin, tiles, step_begin, step_end = place
    rows, token_rows, out_row, sequence, starts = ends
    scale, scale2 = scales
    N: gl.constexpr = k_at.shape[3]
    M: gl.constexpr = q_at.shape[3]
    D: gl.constexpr = k_at.shape[4]
    DV: gl.constexpr = v_at.shape[4]
    dtype: gl.constexpr = k_at.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    k_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    v_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    by_token: gl.constexpr = gl.SliceLayout(0, scores)

    first += SIDE * N
    position = position_of(sequence, starts)
    begin, end, whole_begin, whole_end = seen_by(first, N, rows, position + token_rows, SPAN)
    if starts is not None:  # from positions to rows
        begin = gl.maximum(begin - position, 0)
        end -= position
        whole_begin -= position
        whole_end -= position
    # Steps that this half sees: a program's tile begins with the first half's and ends with the
    # second's.
    seen_low = (begin - tile_begin) // M
    seen_high = gl.cdiv(gl.maximum(end - tile_begin, 0), M)
    if first >= rows:
        seen_high = seen_low

    k_tile = k_at.index(SIDE).reshape([N, D])
    v_tile = v_at.index(SIDE).reshape([N, DV])
    s_keys = (first + gl.arange(0, N, gl.SliceLayout(1, scores)))[:, None]
    i = gl.arange(0, M, by_token)
    dk_acc = gl.zeros([N, D], gl.float32, k_sums)
    dv_acc = gl.zeros([N, DV], gl.float32, v_sums)
    mbarrier.wait(loaded, 0)
    n = 0
    for number in range(EACH):
        all_low, all_high = _steps(number, tiles, step_begin, step_end)
        low = gl.minimum(gl.maximum(seen_low, all_low), all_high)
        high = gl.maximum(gl.minimum(seen_high, all_high), low)
        let_by(n, n + low - all_low, full, empty, STAGES)
        n += low - all_low
        for step in range(low, high):
            row = tile_begin + step * M
            stage = n % STAGES
            q_tile = q_at.index(stage).reshape([M, D])
            do_tile = do_at.index(stage).reshape([M, DV])
            mbarrier.wait(full.index(stage), (n // STAGES) & 1)
            s = warpgroup_mma(
                k_tile, q_tile.permute((1, 0)), gl.zeros([N, M], gl.float32, scores),
                use_acc=False, is_async=True,
            )  # fmt: skip
            dp = warpgroup_mma(
                v_tile, do_tile.permute((1, 0)), gl.zeros([N, M], gl.float32, scores),
                use_acc=False, is_async=True,
            )  # fmt: skip
            s = warpgroup_mma_wait(1, deps=[s])
            at = stage * (lines_at.shape[0] // STAGES)
            lse2_row = lines_at.index(at).reshape([M]).load(by_token)
            if (row < whole_begin) | (row + M > whole_end):
                seen = sees((position + row + i)[None, :], s_keys, SPAN)
                s = gl.where(seen & (row + i < token_rows)[None, :], s, float("-inf"))
                # Rows that see no key have lse2 = -inf, and -inf - -inf is NaN.
                lse2_row = gl.where(lse2_row == float("-inf"), 0.0, lse2_row)
            p = gl.exp2(s * scale2 - lse2_row[None, :])
            if lines_at.shape[0] > 2 * STAGES:
                p = p * lines_at.index(at + 2).reshape([M]).load(by_token)[None, :]
            p16 = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, v_sums, 2))
            dp = warpgroup_mma_wait(0, deps=[dp])
            dv_acc = warpgroup_mma(p16, do_tile, dv_acc, is_async=True)
            delta_row = lines_at.index(at + 1).reshape([M]).load(by_token)
            ds = p * (dp - delta_row[None, :])
            ds16 = gl.convert_layout(ds.to(dtype), gl.DotOperandLayout(0, k_sums, 2))
            dk_acc = warpgroup_mma(ds16, q_tile, dk_acc, is_async=True)
            dk_acc, dv_acc = warpgroup_mma_wait(0, deps=[dk_acc, dv_acc])
            mbarrier.arrive(empty.index(stage))
            n += 1
        let_by(n, n + all_high - high, full, empty, STAGES)
        n += all_high - high

    left = rows - first
    store(dk + (out_row + SIDE * N) * out_strides[0], out_strides[0], left, dk_acc * scale)
    store(dv + (out_row + SIDE * N) * out_strides[1], out_strides[1], left, dv_acc)


@gluon.jit
def dkdv_kernel(
    q, k, v, do, lse2, delta, gate, dk, dv, strides, tokens, keys, starts, scale, scale2,
    SIZES: gl.constexpr, SPAN: gl.constexpr, EACH: gl.constexpr, SPLITS: gl.constexpr,
    TOGETHER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`span_bwd_kernels.dkdv_kernel` for dense sequences; tokens, keys: numbers per sequence.

    strides: strides of dk and of dv by (row, head, part). starts: positions of first tokens.
    """
    M: gl.constexpr = q.block_shape[2]
    N: gl.constexpr = k.block_shape[2]
    G: gl.constexpr = SIZES.G
    LINES: gl.constexpr = 2 if gate is None else 4  # a power of two
    tile, part = key_part(SIZES.HQ, EACH, SPLITS, TOGETHER)
    first_head = part // SPLITS * EACH
    kv_head = first_head // G
    tiles_each = gl.cdiv(keys, 2 * N)
    sequence = tile // tiles_each
    first = tile % tiles_each * (2 * N)
    position = position_of(sequence, starts)
    begin, end, _, _ = seen_by(first, 2 * N, keys, position + tokens, SPAN)
    if starts is not None:
        begin = gl.maximum(begin - position, 0)
        end -= position
    begin = begin // 4 * 4  # by TMA, a line starts at a multiple of 16 bytes
    tiles = gl.cdiv(gl.maximum(end - begin, 0), M)
    share = gl.cdiv(tiles * EACH, SPLITS)
    step_begin = part % SPLITS * share
    step_end = gl.minimum(step_begin + share, tiles * EACH)

    k_at = room(k, 2)
    v_at = room(v, 2)
    q_at = room(q, STAGES)
    do_at = room(do, STAGES)
    lines_at = room(lse2, STAGES * LINES)
    loaded = once()
    full, empty = ring(STAGES, 2)

    place = first, begin, tiles, step_begin, step_end
    held = k_at, v_at, q_at, do_at, lines_at, loaded, full, empty
    of_part = (part % (G // EACH * SPLITS)).to(gl.int64)
    dk += kv_head.to(gl.int64) * strides[0][1] + of_part * strides[0][2]
    dv += kv_head.to(gl.int64) * strides[1][1] + of_part * strides[1][2]
    ends = keys, tokens, sequence.to(gl.int64) * keys + first, sequence, starts
    rows, scales = (strides[0][0], strides[1][0]), (scale, scale2)
    heads = sequence, kv_head, first_head
    gl.warp_specialize(
        [
            (_sum_keys, (held, dk, dv, rows, place, ends, scales, 0, SPAN, EACH, STAGES)),
            (_sum_keys, (held, dk, dv, rows, place, ends, scales, 1, SPAN, EACH, STAGES)),
            (_fetch, (q, k, v, do, lse2, delta, gate, held, heads, place, EACH, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
