"""Warp-specialized dq and delta of the selected branch."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.kernels.common import with_rest
from nsa.kernels.hopper.parts import ring, room, wide
from nsa.kernels.hopper.selected import fetch_blocks, masked, tile_at, times_block
from nsa.kernels.selected import delta_left, rounds


@gluon.jit
def _probabilities(s, scale2, lse2_rows, sees, block, first, token, i):
    """Probabilities for scores s [64, N] of a block, see `masked`; 0 if a token does not see it."""
    s = masked(s, block, first, token, i)
    return gl.exp2(s * scale2 - gl.where(sees, lse2_rows, float("inf"))[:, None])


@gluon.jit
def _sum_queries(
    given, SIDE: gl.constexpr, TILE: gl.constexpr, BRANCH: gl.constexpr, OTHERS: gl.constexpr,
    ADD: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: dq and delta of every other tile.

    A block's products for scores and dP overlap with the previous block's product with dS.
    """
    rows, held, fetched, statistics, gated, out, strides, place, union, sizes = given
    q, do, o, rest = rows
    q_at, do_at = held
    k_at, v_at, k_full, k_empty, v_full, v_empty = fetched
    lse2, kept, deltas = statistics
    gates, dgates = gated
    dq, delta = out
    of_q, of_do, of_o, of_gates, of_dgates, of_dq = strides
    total, scale, scale2 = sizes
    tokens, kv_heads = place[0], place[2]
    M: gl.constexpr = q_at.shape[1]
    N: gl.constexpr = k_at.shape[3]
    D: gl.constexpr = k_at.shape[4]
    HEADS: gl.constexpr = TILE.heads
    dtype: gl.constexpr = k_at.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, scores)
    by_sum: gl.constexpr = gl.SliceLayout(1, sums)
    as_factor: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    WIDE: gl.constexpr = wide(D, dtype)

    q_tile = q_at.index(SIDE)
    do_tile = do_at.index(SIDE)
    i = gl.arange(0, N, gl.SliceLayout(0, scores))
    d = gl.arange(0, D, gl.SliceLayout(0, WIDE))[None, :]
    r = gl.arange(0, M, by_row)
    wide_r = gl.arange(0, M, gl.SliceLayout(1, WIDE))
    token = r // HEADS
    n = 0  # blocks so far
    for number in range(2 * gl.program_id(0) + SIDE, place[3], 2 * gl.num_programs(0)):
        sequence, kv_head, first, blocks, members, count, position = tile_at(
            number, place, union, TILE
        )
        start = sequence.to(gl.int64) * tokens + first
        left = gl.minimum(tokens - first, TILE.tokens)
        there = (wide_r // HEADS < left)[:, None]
        row = (start + wide_r // HEADS)[:, None]
        head = (kv_head * HEADS + wide_r % HEADS)[:, None]
        # What these warps have put there is what products read, by another way to that memory.
        q_tile.store(gl.load(q + row * of_q[0] + head * of_q[1] + d, mask=there, other=0.0))
        dos = gl.load(do + row * of_do[0] + head * of_do[1] + d, mask=there, other=0.0)
        do_tile.store(dos)
        fence_async_shared()
        at_o = row * of_o[0] + head * of_o[1] + d
        outputs = gl.load(o + at_o, mask=there, other=0.0)
        if rest is not None:
            outputs = with_rest(outputs, gl.load(rest + at_o, mask=there, other=0))
        product = gl.sum(dos.to(gl.float32) * outputs.to(gl.float32), 1)
        valid = token < left
        heads = kv_head * HEADS + r % HEADS
        at_row = (start + token) * (kv_heads * HEADS) + heads
        lse2_rows = gl.load(lse2 + at_row, mask=valid, other=float("-inf"))
        sees_any = lse2_rows > float("-inf")
        lse2_rows = gl.where(sees_any, lse2_rows, float("inf"))  # no key: no probability
        shift, gate = delta_left(
            gl.convert_layout(product, by_row), gates, deltas, start + token, heads, valid,
            sees_any, of_gates, total, BRANCH, OTHERS,
        )  # fmt: skip
        if kept is not None:
            share = gl.load(kept + at_row, mask=valid, other=0.0)
        acc = gl.zeros([M, D], gl.float32, sums)
        for _ in range(rounds(position, N, TILE.slots, TILE.tokens)):
            acc = gl.zeros([M, D], gl.float32, sums)
            # Tokens that selected nothing take one step, too, that they see nothing of.
            block = gl.load(blocks, mask=count > 0, other=0)
            member = gl.load(members, mask=count > 0, other=0)
            stage = SIDE * K_STAGES + n % K_STAGES
            of_v = SIDE * V_STAGES + n % V_STAGES
            s = times_block(q_tile, k_at, k_full, n, SIDE, K_STAGES, scores)
            dp = times_block(do_tile, v_at, v_full, n, SIDE, V_STAGES, scores)
            s = warpgroup_mma_wait(1, deps=[s])
            sees = ((member >> token) & 1) == 1
            p = _probabilities(s, scale2, lse2_rows, sees, block, position, token, i)
            block = gl.load(blocks + 1, mask=count > 1, other=0)
            member = gl.load(members + 1, mask=count > 1, other=0)
            dp = warpgroup_mma_wait(0, deps=[dp])
            mbarrier.arrive(v_empty.index(of_v))
            ds = p * (dp - shift[:, None])
            beyond = gl.sum(ds, 1)
            ds16 = gl.convert_layout(ds.to(dtype), as_factor)
            for step in range(1, count):
                before = stage
                n += 1
                stage = SIDE * K_STAGES + n % K_STAGES
                of_v = SIDE * V_STAGES + n % V_STAGES
                s = times_block(q_tile, k_at, k_full, n, SIDE, K_STAGES, scores)
                dp = times_block(do_tile, v_at, v_full, n, SIDE, V_STAGES, scores)
                acc = warpgroup_mma(ds16, k_at.index(before).reshape([N, D]), acc, is_async=True)
                sees = ((member >> token) & 1) == 1
                this = block
                block = gl.load(blocks + step + 1, mask=step + 1 < count, other=0)
                member = gl.load(members + step + 1, mask=step + 1 < count, other=0)
                s = warpgroup_mma_wait(2, deps=[s])
                p = _probabilities(s, scale2, lse2_rows, sees, this, position, token, i)
                dp = warpgroup_mma_wait(1, deps=[dp])
                mbarrier.arrive(v_empty.index(of_v))
                ds = p * (dp - shift[:, None])
                beyond += gl.sum(ds, 1)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(k_empty.index(before))
                ds16 = gl.convert_layout(ds.to(dtype), as_factor)
            acc = warpgroup_mma(ds16, k_at.index(stage).reshape([N, D]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(k_empty.index(stage))
            n += 1
            if kept is not None:
                shift = shift * share
            shift = shift + beyond  # probabilities add up to 1, or to their share

        gl.store(delta + at_row, shift, mask=valid)
        if dgates is not None:
            at_dgates = dgates + (start + token) * of_dgates[0] + heads * of_dgates[1]
            to_dgates = shift.to(dgates.dtype.element_ty)
            gl.store(at_dgates + BRANCH * of_dgates[2], to_dgates, mask=valid)
        acc = acc * gl.convert_layout(gate * scale, by_sum)[:, None]
        # The queries are done with: their place is where rows change hands.
        at_dq = dq + row * of_dq[0] + head * of_dq[1] + d
        if ADD:
            q_tile.store(gl.load(at_dq, mask=there, other=0.0))
            acc = acc + q_tile.load(sums).to(gl.float32)
        q_tile.store(acc.to(dtype))
        gl.store(at_dq, q_tile.load(WIDE), mask=there)


@gluon.jit
def selected_dq_kernel(
    q, k, v, do, o, rest, lse2, kept, deltas, gates, dgates, dq, delta, strides, place, union,
    sizes, ROWS: gl.constexpr, TILE: gl.constexpr, BRANCH: gl.constexpr, OTHERS: gl.constexpr,
    ADD: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    """`selected_dq._selected_dq` for dense sequences; strides: of q, do, o, gates, dgates and dq.

    place, union: as in `selected.selected_kernel`. sizes: tokens of all sequences, scale, scale2.
    """
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_at = gl.allocate_shared_memory(k.dtype, [2, ROWS, k.block_shape[3]], flat)
    do_at = gl.allocate_shared_memory(k.dtype, [2, ROWS, v.block_shape[3]], flat)
    k_at = room(k, 2 * K_STAGES)
    v_at = room(v, 2 * V_STAGES)
    k_full, k_empty = ring(2 * K_STAGES, 1)
    v_full, v_empty = ring(2 * V_STAGES, 1)
    fetched = k_at, v_at, k_full, k_empty, v_full, v_empty
    rows, held, statistics = (q, do, o, rest), (q_at, do_at), (lse2, kept, deltas)
    gated, out = (gates, dgates), (dq, delta)
    given = rows, held, fetched, statistics, gated, out, strides, place, union, sizes
    gl.warp_specialize(
        [
            (_sum_queries, (given, 0, TILE, BRANCH, OTHERS, ADD, K_STAGES, V_STAGES)),
            (_sum_queries, (given, 1, TILE, BRANCH, OTHERS, ADD, K_STAGES, V_STAGES)),
            (fetch_blocks, (k, v, fetched, place, union, 0, TILE, K_STAGES, V_STAGES, True)),
            (fetch_blocks, (k, v, fetched, place, union, 1, TILE, K_STAGES, V_STAGES, True)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
