"""Warp-specialized forward of the selected branch."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.kernels.common import in_units, position_of, rest_of, sunk, truncated
from nsa.kernels.hopper.parts import fetch_step, ring, room, wide
from nsa.kernels.selected import rounds


@gluon.jit
def tile_at(number, place, union, TILE: gl.constexpr):
    """(sequence, KV head, first token, pointers to blocks and to members, number of blocks, the
    first token's position)."""
    tokens, tiles, kv_heads, _, starts = place
    blocks, members, counts = union
    kv_head = number // tiles
    per_sequence = gl.cdiv(tokens, TILE.tokens)
    sequence = number % tiles // per_sequence
    first = number % tiles % per_sequence * TILE.tokens
    at = (number % tiles).to(gl.int64) * kv_heads + kv_head
    count = gl.load(counts + at)
    blocks += at * TILE.slots
    members += at * TILE.slots
    return sequence, kv_head, first, blocks, members, count, position_of(sequence, starts) + first


@gluon.jit
def fetch_blocks(
    k, v, fetched, place, union, SIDE: gl.constexpr, TILE: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, TWICE: gl.constexpr,
):  # fmt: skip
    """Producer warp: fetch keys and values of the blocks of one warpgroup's tiles.

    TWICE: if True, fetch them `rounds` times.
    """
    N: gl.constexpr = k.block_shape[2]
    n = 0
    for number in range(2 * gl.program_id(0) + SIDE, place[3], 2 * gl.num_programs(0)):
        sequence, kv_head, _, blocks, _, count, position = tile_at(number, place, union, TILE)
        ahead = gl.load(blocks, mask=count > 0, other=0)
        steps = gl.maximum(count, 1)
        if TWICE:
            steps *= rounds(position, N, TILE.slots, TILE.tokens)
        for i in range(steps):
            where = [sequence, kv_head, ahead * N, 0]
            after = i + 1
            if TWICE:
                after = gl.where(after < count, after, after - count)
            ahead = gl.load(blocks + after, mask=after < count, other=0)
            fetch_step(k, v, where, fetched, n, SIDE, K_STAGES, V_STAGES)
            n += 1


@gluon.jit
def times_block(rows, x_at, full, n, RING: gl.constexpr, STAGES: gl.constexpr,
                LAYOUT: gl.constexpr):  # fmt: skip
    """Start rows [M, D] times keys, or values, of block n of ring RING once they have arrived."""
    M: gl.constexpr = rows.shape[0]
    N: gl.constexpr = x_at.shape[3]
    D: gl.constexpr = x_at.shape[4]
    stage = RING * STAGES + n % STAGES
    mbarrier.wait(full.index(stage), (n // STAGES) & 1)
    return warpgroup_mma(
        rows, x_at.index(stage).reshape([N, D]).permute((1, 0)),
        gl.zeros([M, N], gl.float32, LAYOUT), use_acc=False, is_async=True,
    )  # fmt: skip


@gluon.jit
def masked(s, block, first, token, i):
    """Scores s [64, N] of a block, -inf where a key is after its row's token.

    i [N] counts the keys, and token [64] is each row's token relative to `first`, the tile's. A
    token sees all of a block that it selected, unless it is inside: most blocks need no mask.
    """
    N: gl.constexpr = s.shape[1]
    if block * N + N > first + 1:
        s = gl.where((block * N + i)[None, :] <= (first + token)[:, None], s, float("-inf"))
    return s


@gluon.jit
def _weighed(s, scale2, m, block, member, first, token, i):
    """`common.weighed` of the scores s [64, N] of a block, see `masked`."""
    sees = ((member >> token) & 1) == 1
    s = masked(s, block, first, token, i)
    m_new = gl.where(sees, gl.maximum(m, gl.max(s, 1) * scale2), m)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    rescale = gl.exp2(m - shift)
    return gl.exp2(s * scale2 - gl.where(sees, shift, float("inf"))[:, None]), m_new, rescale


@gluon.jit
def _attend(
    given, SIDE: gl.constexpr, TILE: gl.constexpr, BRANCH: gl.constexpr,
    BASE_BRANCH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: o and lse2 of every other tile.

    A block's score product overlaps with the previous block's product with values.
    """
    q, q_at, fetched, out, mix, strides, place, union, total_rows, scale2 = given
    k_at, v_at, k_full, k_empty, v_full, v_empty = fetched
    o, rest, lse2 = out
    gates, base_o, base_unit, sink2 = mix
    of_q, of_o, of_gates, of_base = strides
    tokens, kv_heads = place[0], place[2]
    M: gl.constexpr = q_at.shape[1]
    N: gl.constexpr = k_at.shape[3]
    D: gl.constexpr = k_at.shape[4]
    HEADS: gl.constexpr = TILE.heads
    FIRST: gl.constexpr = SIDE * STAGES
    dtype: gl.constexpr = v_at.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, scores)
    by_sum: gl.constexpr = gl.SliceLayout(1, sums)
    WIDE: gl.constexpr = wide(D, dtype)

    q_tile = q_at.index(SIDE)
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
        # Products read these warps' writes by another path (the async proxy).
        q_tile.store(gl.load(q + row * of_q[0] + head * of_q[1] + d, mask=there, other=0.0))
        fence_async_shared()
        m = gl.full([M], float("-inf"), gl.float32, by_row)
        acc = gl.zeros([M, D], gl.float32, sums)
        # A tile whose tokens selected nothing has one step, too, without effect.
        block = gl.load(blocks, mask=count > 0, other=0)
        member = gl.load(members, mask=count > 0, other=0)
        stage = FIRST + n % STAGES
        s = times_block(q_tile, k_at, k_full, n, SIDE, STAGES, scores)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage))
        p, m, rescale = _weighed(s, scale2, m, block, member, position, token, i)
        total = gl.sum(p, 1)
        p = truncated(p, dtype)
        kept = gl.sum(p, 1)
        p16 = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, sums, 2))
        block = gl.load(blocks + 1, mask=count > 1, other=0)
        member = gl.load(members + 1, mask=count > 1, other=0)
        for step in range(1, count):
            before, turn = stage, (n // STAGES) & 1
            n += 1
            stage = FIRST + n % STAGES
            s = times_block(q_tile, k_at, k_full, n, SIDE, STAGES, scores)
            mbarrier.wait(v_full.index(before), turn)
            acc = warpgroup_mma(p16, v_at.index(before).reshape([N, D]), acc, is_async=True)
            this, these = block, member
            block = gl.load(blocks + step + 1, mask=step + 1 < count, other=0)
            member = gl.load(members + step + 1, mask=step + 1 < count, other=0)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(stage))
            p, m, rescale = _weighed(s, scale2, m, this, these, position, token, i)
            total = total * rescale + gl.sum(p, 1)
            p = truncated(p, dtype)
            kept = kept * rescale + gl.sum(p, 1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(before))
            acc = acc * gl.convert_layout(rescale, by_sum)[:, None]
            p16 = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, sums, 2))
        mbarrier.wait(v_full.index(stage), (n // STAGES) & 1)
        acc = warpgroup_mma(p16, v_at.index(stage).reshape([N, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(stage))
        n += 1

        valid = token < left
        heads = kv_head * HEADS + r % HEADS
        total = gl.where(m == float("-inf"), 1.0, total)
        kept = gl.where(m == float("-inf"), 1.0, kept)
        at_lse2 = lse2 + (start + token) * (kv_heads * HEADS) + heads
        lse2_rows = m + gl.log2(total)
        gl.store(at_lse2, lse2_rows, mask=valid)
        if sink2 is not None:
            kept = sunk(kept, lse2_rows, gl.load(sink2 + heads))
        factor = 1.0 / kept
        at_gates = gates
        if gates is not None:
            at_gates = gates + (start + token) * of_gates[0] + heads * of_gates[1]
            of_branch = gl.load(at_gates + BRANCH * of_gates[2], mask=valid, other=0.0)
            factor = factor * of_branch.to(gl.float32)
        acc = acc * gl.convert_layout(factor, by_sum)[:, None]
        # The queries are no longer needed: rows are exchanged in their memory.
        if base_o is not None:
            at_base = base_o + row * of_base[0] + head * of_base[1] + d
            if base_o.dtype.element_ty == gl.float32:  # there is no room to move it
                by_token = gl.arange(0, M, by_sum)
                at_base = base_o + (start + by_token // HEADS)[:, None] * of_base[0]
                at_base += (kv_head * HEADS + by_token % HEADS)[:, None] * of_base[1]
                at_base += gl.arange(0, D, gl.SliceLayout(0, sums))[None, :]
                seen = (by_token // HEADS < left)[:, None]
                other = gl.load(at_base, mask=seen, other=0.0)
            elif base_unit is None:
                q_tile.store(gl.load(at_base, mask=there, other=0.0))
                other = q_tile.load(sums).to(gl.float32)
            else:
                q_tile.store(gl.cast(gl.load(at_base, mask=there, other=0), dtype, bitcast=True))
                other = in_units(gl.cast(q_tile.load(sums), gl.int16, bitcast=True))
                unit = gl.load(
                    base_unit + heads.to(gl.int64) * total_rows + start + token, mask=valid,
                    other=0.0,
                )  # fmt: skip
                other = other * gl.convert_layout(unit, by_sum)[:, None]
            if BASE_BRANCH >= 0:
                of_base_o = gl.load(at_gates + BASE_BRANCH * of_gates[2], mask=valid, other=0.0)
                other = other * gl.convert_layout(of_base_o.to(gl.float32), by_sum)[:, None]
            acc = acc + other
        at_o = row * of_o[0] + head * of_o[1] + d
        q_tile.store(acc.to(dtype))
        gl.store(o + at_o, q_tile.load(WIDE), mask=there)
        if rest is not None:
            low = rest_of(acc, acc.to(dtype)).to(gl.int16)
            q_tile.store(gl.cast(low, dtype, bitcast=True))
            low = gl.cast(q_tile.load(WIDE), gl.int16, bitcast=True)
            gl.store(rest + at_o, low.to(gl.int8), mask=there)


@gluon.jit
def selected_kernel(
    q, k, v, o, rest, lse2, gates, base_o, base_unit, sink2, strides, place, union, total_rows,
    scale2, ROWS: gl.constexpr, TILE: gl.constexpr, BRANCH: gl.constexpr, BASE_BRANCH: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """`selected_fwd._selected_forward` for dense sequences; strides: of q, o, gates and base_o.

    place: (tokens of a sequence, tiles of a KV head, KV heads, tiles, starts). union: blocks,
    members and counts of each. The two warpgroups walk different tiles and share nothing.
    """
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_at = gl.allocate_shared_memory(k.dtype, [2, ROWS, k.block_shape[3]], flat)
    k_at = room(k, 2 * STAGES)
    v_at = room(v, 2 * STAGES)
    k_full, k_empty = ring(2 * STAGES, 1)
    v_full, v_empty = ring(2 * STAGES, 1)
    fetched = k_at, v_at, k_full, k_empty, v_full, v_empty
    out, mix = (o, rest, lse2), (gates, base_o, base_unit, sink2)
    given = q, q_at, fetched, out, mix, strides, place, union, total_rows, scale2
    gl.warp_specialize(
        [
            (_attend, (given, 0, TILE, BRANCH, BASE_BRANCH, STAGES)),
            (_attend, (given, 1, TILE, BRANCH, BASE_BRANCH, STAGES)),
            (fetch_blocks, (k, v, fetched, place, union, 0, TILE, STAGES, STAGES, False)),
            (fetch_blocks, (k, v, fetched, place, union, 1, TILE, STAGES, STAGES, False)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
