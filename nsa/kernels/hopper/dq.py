"""dq of the compressed and the window branch by specialized warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.kernels.hopper.parts import (
    key_steps,
    let_by,
    once,
    query_tile,
    ring,
    room,
    store,
)
from nsa.kernels.span_common import seen_end, sees


@gluon.jit
def _fetch_keys(q, k, v, do, held, place, first, base, steps, STAGES: gl.constexpr):
    """The warp that fetches: a warpgroup's queries each, then a stage of keys and values a step."""
    q_at, do_at, k_at, v_at, loaded, full, empty = held
    sequence, head, kv_head = place
    M: gl.constexpr = q.block_shape[2]
    N: gl.constexpr = k.block_shape[2]
    mbarrier.expect(loaded, 2 * M * (q.block_shape[3] + do.block_shape[3]) * 2)
    for side in gl.static_range(2):
        where = [sequence, head, first + side * M, 0]
        tma.async_copy_global_to_shared(q, where, loaded, q_at.index(side))
        tma.async_copy_global_to_shared(do, where, loaded, do_at.index(side))
    for n in range(steps):
        stage = n % STAGES
        mbarrier.wait(empty.index(stage), (n // STAGES + 1) & 1)
        bar = full.index(stage)
        mbarrier.expect(bar, N * (k.block_shape[3] + v.block_shape[3]) * 2)
        where = [sequence, kv_head, base + n * N, 0]
        tma.async_copy_global_to_shared(k, where, bar, k_at.index(stage))
        tma.async_copy_global_to_shared(v, where, bar, v_at.index(stage))


@gluon.jit
def _sum_queries(
    given, SIDE: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
    MAKE_DELTA: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """A warpgroup that computes: dq of its half of the queries, and their delta where it is made.

    MAKE_DELTA: as `span_bwd_kernels.dq_kernel`.
    """
    held, rows, gates, dgates, newest, out, first, base, steps, ends, scales = given
    q_at, do_at, k_at, v_at, loaded, full, empty = held
    lse2, delta = rows
    tokens, keys = ends
    scale, scale2 = scales
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

    first += SIDE * M
    low, high, whole_low, whole_high = key_steps(first, M, base, steps, tokens, keys, N, SPAN)
    t = first + gl.arange(0, M, by_row)
    i = gl.arange(0, N, gl.SliceLayout(0, scores))
    lse2_rows = gl.load(lse2 + t, mask=t < tokens, other=float("-inf"))
    lse2_rows = gl.where(lse2_rows == float("-inf"), float("inf"), lse2_rows)
    q_tile = q_at.index(SIDE).reshape([M, D])
    do_tile = do_at.index(SIDE).reshape([M, DV])
    acc = gl.zeros([M, D], gl.float32, sums)
    mbarrier.wait(loaded, 0)
    if MAKE_DELTA:
        v_rows, v_stride = newest
        row = first + gl.arange(0, M, gl.SliceLayout(1, values))
        d = gl.arange(0, DV, gl.SliceLayout(0, values))
        at_newest = v_rows + (seen_end(row, SPAN) - 1).to(gl.int64)[:, None] * v_stride + d[None, :]
        sees_any = (seen_end(row, SPAN) > 0) & (row < tokens)
        v_newest = gl.load(at_newest, mask=sees_any[:, None], other=0.0).to(gl.float32)
        of_newest = gl.sum(do_tile.load(values).to(gl.float32) * v_newest, 1)
        shift = gl.convert_layout(of_newest, by_row)
        plain = gl.zeros([M, D], gl.float32, sums)  # sum P k
        nothing = gl.zeros([M], gl.float32, by_row)
        delta_sums = nothing
        delta_rounded = nothing
        sum_rounded = nothing
    else:
        shift = gl.load(delta + t, mask=t < tokens, other=0.0)
    let_by(0, low, full, empty, STAGES)
    for n in range(low, high):
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
        if (n < whole_low) | (n >= whole_high):
            seen = sees(t[:, None], (base + n * N + i)[None, :], SPAN)
            s = gl.where(seen, s, float("-inf"))
        p = gl.exp2(s * scale2 - lse2_rows[:, None])
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = p * (dp - shift[:, None])
        if MAKE_DELTA:
            p16 = p.to(dtype)
            plain = warpgroup_mma(gl.convert_layout(p16, as_factor), k_tile, plain, is_async=True)
            delta_sums += gl.sum(ds, 1)
            sum_rounded += gl.sum(p16.to(gl.float32), 1)
        ds16 = ds.to(dtype)
        acc = warpgroup_mma(gl.convert_layout(ds16, as_factor), k_tile, acc, is_async=True)
        if MAKE_DELTA:
            delta_rounded += gl.sum(ds16.to(gl.float32), 1)
            acc, plain = warpgroup_mma_wait(0, deps=[acc, plain])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage))

    at_row = first + gl.arange(0, M, by_sum)
    if MAKE_DELTA:
        rounded = delta_rounded / gl.where(sum_rounded == 0, 1.0, sum_rounded)
        rounded = gl.convert_layout(rounded, by_sum)
        acc -= rounded[:, None] * plain
        # Probabilities add up to 1.
        delta_rows = delta_sums + shift
        gl.store(delta + t, delta_rows, mask=t < tokens)
        if dgates is not None:
            at_dgates, dgate_stride = dgates
            to_dgates = delta_rows.to(at_dgates.dtype.element_ty)
            gl.store(at_dgates + t * dgate_stride, to_dgates, mask=t < tokens)
    acc = acc * scale
    if gates is not None:
        at_gates, gate_stride = gates
        at_gates += at_row * gate_stride
        gate = gl.load(at_gates, mask=at_row < tokens, other=0.0).to(gl.float32)
        acc = acc * gate[:, None]
    dq, dq_stride = out
    store(dq + SIDE * M * dq_stride, dq_stride, tokens - first, acc, sums, ADD)


@gluon.jit
def dq_kernel(
    q, k, v, do, v_rows, lse2, delta, gates, dgates, dq, strides, tokens, keys, tiles, total,
    scale, scale2,
    SIZES: gl.constexpr, SPAN: gl.constexpr, BRANCH: gl.constexpr, STAGES: gl.constexpr,
    MAKE_DELTA: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """`span_bwd_kernels.dq_kernel` of dense sequences; strides: of v_rows, gates, dgates and dq."""
    M: gl.constexpr = q.block_shape[2]
    N: gl.constexpr = k.block_shape[2]
    head, sequence, first, base, steps = query_tile(tokens, keys, tiles, SIZES.HQ, M, N, SPAN)

    q_at = room(q, 2)
    do_at = room(do, 2)
    k_at = room(k, STAGES)
    v_at = room(v, STAGES)
    loaded = once()
    full, empty = ring(STAGES)
    held = q_at, do_at, k_at, v_at, loaded, full, empty

    of_values, of_gates, of_dgates, of_dq = strides
    start = sequence.to(gl.int64) * tokens
    wide_head = head.to(gl.int64)
    dq += (start + first) * of_dq[0] + wide_head * of_dq[1]
    v_rows += sequence.to(gl.int64) * keys * of_values[0] + wide_head // SIZES.G * of_values[1]
    newest = v_rows, of_values[0]
    if gates is not None:
        gates += start * of_gates[0] + wide_head * of_gates[1] + BRANCH * of_gates[2]
        gates = gates, of_gates[0]
    if dgates is not None:
        dgates += start * of_dgates[0] + wide_head * of_dgates[1] + BRANCH * of_dgates[2]
        dgates = dgates, of_dgates[0]
    statistics = wide_head * total + start
    rows, ends, scales = (lse2 + statistics, delta + statistics), (tokens, keys), (scale, scale2)
    given = held, rows, gates, dgates, newest, (dq, of_dq[0]), first, base, steps, ends, scales
    place = sequence, head, head // SIZES.G
    gl.warp_specialize(
        [
            (_sum_queries, (given, 0, SPAN, STAGES, MAKE_DELTA, ADD)),
            (_sum_queries, (given, 1, SPAN, STAGES, MAKE_DELTA, ADD)),
            (_fetch_keys, (q, k, v, do, held, place, first, base, steps, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
