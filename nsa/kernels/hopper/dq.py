"""Warp-specialized dq of the compressed and the window branch."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.kernels.hopper.parts import (
    fetch_queries,
    key_steps,
    let_by,
    load,
    query_tile,
    ring,
    room,
    store,
)
from nsa.kernels.span_common import seen_end, sees


@gluon.jit
def _fetch_keys(
    k, v, fetched, place, SIZES: gl.constexpr, ROWS: gl.constexpr, SPAN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Producer warp: fetch a stage of keys and values per step."""
    k_at, v_at, full, empty = fetched
    N: gl.constexpr = k.block_shape[2]
    n = 0
    for number in range(gl.program_id(0), place[3], gl.num_programs(0)):
        tile = query_tile(number, place, SIZES.HQ, ROWS, N, SPAN)
        for step in range(tile[4]):
            stage = n % STAGES
            mbarrier.wait(empty.index(stage), (n // STAGES + 1) & 1)
            bar = full.index(stage)
            mbarrier.expect(bar, N * (k.block_shape[3] + v.block_shape[3]) * 2)
            where = [tile[1], tile[0] // SIZES.G, tile[3] + step * N, 0]
            tma.async_copy_global_to_shared(k, where, bar, k_at.index(stage))
            tma.async_copy_global_to_shared(v, where, bar, v_at.index(stage))
            n += 1


@gluon.jit
def _sum_queries(
    given, SIDE: gl.constexpr, SIZES: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
    BRANCH: gl.constexpr, MAKE_DELTA: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: dq of its half of each tile's queries, and their delta if it is computed.

    MAKE_DELTA: as in `span_bwd_kernels.dq_kernel`.
    """
    queries, fetched, ones, v_rows, rows, gated, dq, strides, place, total, scales = given
    q_at, do_at, q_full, q_empty = queries
    k_at, v_at, full, empty = fetched
    lse2, delta, kept = rows
    gates, dgates = gated
    scale, scale2 = scales
    of_values, of_gates, of_dgates, of_dq = strides
    tokens, keys = place[0], place[1]
    M: gl.constexpr = q_at.shape[3]
    N: gl.constexpr = k_at.shape[3]
    D: gl.constexpr = q_at.shape[4]
    DV: gl.constexpr = do_at.shape[4]
    dtype: gl.constexpr = k_at.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    values: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // DV, DV // 8], [4, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, scores)
    by_sum: gl.constexpr = gl.SliceLayout(1, sums)
    as_factor: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    row_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    to_sum: gl.constexpr = gl.DotOperandLayout(0, row_sums, 2)

    q_tile = q_at.index(SIDE).reshape([M, D])
    do_tile = do_at.index(SIDE).reshape([M, DV])
    i = gl.arange(0, N, gl.SliceLayout(0, scores))
    behind = 0  # steps of the tiles before
    for number in range(gl.program_id(0), place[3], gl.num_programs(0)):
        turn = number // gl.num_programs(0)
        head, sequence, first, base, steps, begin = query_tile(number, place, SIZES.HQ, M, N, SPAN)
        first += SIDE * M
        low, high, whole_low, whole_high = key_steps(
            begin + first, M, base, steps, begin + tokens, keys, N, SPAN
        )
        start = sequence.to(gl.int64) * tokens
        wide_head = head.to(gl.int64)
        t = first + gl.arange(0, M, by_row)
        position = begin + t
        at_row = wide_head * total + start + t
        lse2_rows = gl.load(lse2 + at_row, mask=t < tokens, other=float("-inf"))
        lse2_rows = gl.where(lse2_rows == float("-inf"), float("inf"), lse2_rows)
        acc = gl.zeros([M, D], gl.float32, sums)
        if MAKE_DELTA:
            row = first + gl.arange(0, M, gl.SliceLayout(1, values))
            d = gl.arange(0, DV, gl.SliceLayout(0, values))
            at_newest = v_rows + sequence.to(gl.int64) * keys * of_values[0]
            at_newest += wide_head // SIZES.G * of_values[1]
            newest = (seen_end(begin + row, SPAN) - 1).to(gl.int64)
            at_newest = at_newest + newest[:, None] * of_values[0] + d[None, :]
            sees_any = (newest >= 0) & (row < tokens)
            v_newest = gl.load(at_newest, mask=sees_any[:, None], other=0.0).to(gl.float32)
            mbarrier.wait(q_full.index(SIDE), turn & 1)
            of_newest = gl.sum(do_tile.load(values).to(gl.float32) * v_newest, 1)
            shift = gl.convert_layout(of_newest, by_row)
            plain = gl.zeros([M, D], gl.float32, sums)  # sum P k
            delta_sums = gl.zeros([M], gl.float32, by_row)
            # Sums of rounded numbers by a product with ones: unpacking them is slower.
            delta_rounded = gl.zeros([M, 8], gl.float32, row_sums)
            sum_rounded = gl.zeros([M, 8], gl.float32, row_sums)
        else:
            shift = gl.load(delta + at_row, mask=t < tokens, other=0.0)
            mbarrier.wait(q_full.index(SIDE), turn & 1)
        let_by(behind, behind + low, full, empty, STAGES)
        for step in range(low, high):
            n = behind + step
            stage = n % STAGES
            k_tile = k_at.index(stage).reshape([N, D])
            mbarrier.wait(full.index(stage), (n // STAGES) & 1)
            s = warpgroup_mma(
                q_tile, k_tile.permute((1, 0)), gl.zeros([M, N], gl.float32, scores),
                use_acc=False, is_async=True,
            )  # fmt: skip
            dp = warpgroup_mma(
                do_tile, v_at.index(stage).reshape([N, DV]).permute((1, 0)),
                gl.zeros([M, N], gl.float32, scores), use_acc=False, is_async=True,
            )  # fmt: skip
            s = warpgroup_mma_wait(1, deps=[s])
            if (step < whole_low) | (step >= whole_high):
                seen = sees(position[:, None], (base + step * N + i)[None, :], SPAN)
                s = gl.where(seen, s, float("-inf"))
            p = gl.exp2(s * scale2 - lse2_rows[:, None])
            dp = warpgroup_mma_wait(0, deps=[dp])
            ds = p * (dp - shift[:, None])
            if MAKE_DELTA:
                p16 = p.to(dtype)
                plain = warpgroup_mma(
                    gl.convert_layout(p16, as_factor), k_tile, plain, is_async=True
                )
                sum_rounded = warpgroup_mma(
                    gl.convert_layout(p16, to_sum), ones, sum_rounded, is_async=True
                )
                delta_sums += gl.sum(ds, 1)
            ds16 = ds.to(dtype)
            acc = warpgroup_mma(gl.convert_layout(ds16, as_factor), k_tile, acc, is_async=True)
            if MAKE_DELTA:
                delta_rounded = warpgroup_mma(
                    gl.convert_layout(ds16, to_sum), ones, delta_rounded, is_async=True
                )
                acc, plain, sum_rounded, delta_rounded = warpgroup_mma_wait(
                    0, deps=[acc, plain, sum_rounded, delta_rounded]
                )
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(stage))
        mbarrier.arrive(q_empty.index(SIDE))
        let_by(behind + high, behind + steps, full, empty, STAGES)
        behind += steps

        row = first + gl.arange(0, M, by_sum)
        if MAKE_DELTA:
            p_rounded = gl.sum(sum_rounded, 1)  # as often as there are columns
            rounded = gl.sum(delta_rounded, 1) / gl.where(p_rounded == 0, 1.0, p_rounded)
            if kept is not None:
                share = gl.load(kept + at_row, mask=t < tokens, other=0.0)
                rounded = gl.convert_layout(rounded, by_row) * share - shift * (1.0 - share)
                shift = shift * share
            rounded = gl.convert_layout(-rounded, by_sum)
            acc += rounded[:, None] * plain
            # Probabilities add up to 1, or to their share.
            delta_rows = delta_sums + shift
            gl.store(delta + at_row, delta_rows, mask=t < tokens)
            if dgates is not None:
                at_dgates = dgates + start * of_dgates[0] + wide_head * of_dgates[1]
                at_dgates += BRANCH * of_dgates[2]
                to_dgates = delta_rows.to(dgates.dtype.element_ty)
                gl.store(at_dgates + t * of_dgates[0], to_dgates, mask=t < tokens)
        acc = acc * scale
        if gates is not None:
            at_gates = gates + start * of_gates[0] + wide_head * of_gates[1] + BRANCH * of_gates[2]
            gate = gl.load(at_gates + row * of_gates[0], mask=row < tokens, other=0.0)
            acc = acc * gate.to(gl.float32)[:, None]
        at_dq = dq + (start + first) * of_dq[0] + wide_head * of_dq[1]
        if ADD:
            acc += load(at_dq, of_dq[0], tokens - first, sums, D)
        store(at_dq, of_dq[0], tokens - first, acc)


@gluon.jit
def dq_kernel(
    q, k, v, do, v_rows, lse2, delta, kept, gates, dgates, dq, strides, place, total, scale,
    scale2,
    SIZES: gl.constexpr, SPAN: gl.constexpr, BRANCH: gl.constexpr, STAGES: gl.constexpr,
    MAKE_DELTA: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """`span_bwd_kernels.dq_kernel` for dense sequences; strides: of v_rows, gates, dgates and dq.

    place: as in `parts.query_tile`.
    """
    M: gl.constexpr = q.block_shape[2]
    N: gl.constexpr = k.block_shape[2]
    q_at = room(q, 2)
    do_at = room(do, 2)
    k_at = room(k, STAGES)
    v_at = room(v, STAGES)
    q_full, q_empty = ring(2, 1)
    full, empty = ring(STAGES, 2)

    one = gl.full([8, N], 1.0, k.dtype, gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
    ones = gl.allocate_shared_memory(k.dtype, [8, N], gl.NVMMASharedLayout(128, 16, 2), one)
    ones = ones.permute((1, 0))
    fence_async_shared()

    queries = q_at, do_at, q_full, q_empty
    fetched = k_at, v_at, full, empty
    rows, gated, scales = (lse2, delta, kept), (gates, dgates), (scale, scale2)
    given = queries, fetched, ones, v_rows, rows, gated, dq, strides, place, total, scales
    gl.warp_specialize(
        [
            (_sum_queries, (given, 0, SIZES, SPAN, STAGES, BRANCH, MAKE_DELTA, ADD)),
            (_sum_queries, (given, 1, SIZES, SPAN, STAGES, BRANCH, MAKE_DELTA, ADD)),
            (_fetch_keys, (k, v, fetched, place, SIZES, M, SPAN, STAGES)),
            (fetch_queries, (q, do, q_at, do_at, q_full, q_empty, place, SIZES, N, SPAN)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
