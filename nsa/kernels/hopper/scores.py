"""Warp-specialized scores and top n."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.kernels.common import position_of
from nsa.kernels.hopper.parts import let_by, ring, room
from nsa.kernels.ranking import ILLEGAL, NONE, candidates, indices
from nsa.kernels.span_common import seen_end

STRIDES = gl.constexpr(4)  # of compression in a selectable block


@gluon.constexpr_function
def together(G):
    """Number of heads whose queries are fetched together, with one barrier for all."""
    return 2 - G % 2


@gluon.jit
def _tile_at(number, place, ROWS: gl.constexpr, BLOCKS: gl.constexpr, CONFIG: gl.constexpr):
    """(KV head, sequence, first token, steps of BLOCKS blocks, steps of the first warpgroup,
    position of the sequence's first token).

    place: (tokens of a sequence, tiles, KV heads, tiles of all, starts). Tiles that see most come
    first; one whose tokens select every legal block has no step.
    """
    tokens, tiles, kv_heads, _, starts = place
    tile = tiles - 1 - number // kv_heads
    per_sequence = gl.cdiv(tokens, ROWS)
    first = tile % per_sequence * ROWS
    sequence = tile // per_sequence
    position = position_of(sequence, starts)
    last = position + gl.minimum(first + ROWS, tokens) - 1
    legal = last // CONFIG.select_block + 1
    steps = gl.where(legal > CONFIG.select_count, gl.cdiv(legal, BLOCKS), 0)
    return number % kv_heads, sequence, first, steps, gl.cdiv(steps, 2), position


@gluon.jit
def _fetch_keys(
    k, k_at, k_full, k_empty, place,
    ROWS: gl.constexpr, CONFIG: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Producer warp: fetch keys, in each step those of one warpgroup and of the other."""
    N: gl.constexpr = k.block_shape[2]
    taken = 0  # steps of the first warpgroup
    other = 0
    for number in range(gl.program_id(0), place[3], gl.num_programs(0)):
        kv_head, sequence, _, steps, each, _ = _tile_at(number, place, ROWS, N // STRIDES, CONFIG)
        for step in range(each):
            for side in gl.static_range(2):
                at = side * each + step
                if at < steps:
                    n = taken + step if side == 0 else other + step
                    stage = side * STAGES + n % STAGES
                    bar = k_full.index(stage)
                    mbarrier.wait(k_empty.index(stage), (n // STAGES + 1) & 1)
                    mbarrier.expect(bar, N * k.block_shape[3] * 2)
                    where = [sequence, kv_head, at * N, 0]
                    tma.async_copy_global_to_shared(k, where, bar, k_at.index(stage))
        taken += each
        other += steps - each


@gluon.jit
def _fetch_queries(
    q, lse2, given, place,
    G: gl.constexpr, BLOCKS: gl.constexpr, CONFIG: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Producer warp: fetch two heads' queries and statistics for both warpgroups in every step.

    They are in L2 if the next step begins with the heads that the last one ended with.
    """
    q_at, lse2_at, full, empty = given
    ROWS: gl.constexpr = q.block_shape[2]
    TOGETHER: gl.constexpr = together(G)
    n = 0
    for number in range(gl.program_id(0), place[3], gl.num_programs(0)):
        kv_head, sequence, first, _, each, _ = _tile_at(number, place, ROWS, BLOCKS, CONFIG)
        for step in range(each):
            for i in range(0, G, TOGETHER):
                stage = n % STAGES
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), (n // STAGES + 1) & 1)
                mbarrier.expect(bar, TOGETHER * ROWS * (q.block_shape[3] * 2 + 4))
                for j in gl.static_range(TOGETHER):
                    head = kv_head * G + i + j + step % 2 * (G - 1 - 2 * (i + j))
                    at = stage * TOGETHER + j
                    where = [sequence, head, first, 0]
                    tma.async_copy_global_to_shared(q, where, bar, q_at.index(at))
                    where = [head, sequence, first]
                    tma.async_copy_global_to_shared(lse2, where, bar, lse2_at.index(at))
                n += 1


@gluon.jit
def _times_keys(q_at, at, k_tile, zeros):
    """Start the asynchronous product of the queries at `at` with keys."""
    M: gl.constexpr = q_at.shape[3]
    D: gl.constexpr = q_at.shape[4]
    q_tile = q_at.index(at).reshape([M, D])
    return warpgroup_mma(q_tile, k_tile, zeros, use_acc=False, is_async=True)


@gluon.jit
def _pooled(p, left_over, PER_COMPRESSED: gl.constexpr, LAYOUT: gl.constexpr):
    """Eq. 9, as `topk.pool`, for p [M, N] whose columns are the keys of `in_columns`."""
    M: gl.constexpr = p.shape[0]
    BLOCKS: gl.constexpr = p.shape[1] // STRIDES
    by_place = p.reshape([M, 2, 2, BLOCKS]).permute((0, 3, 1, 2))
    even, odd = gl.split(by_place)
    p0, p2 = gl.split(even)
    p1, p3 = gl.split(odd)
    own = p0 * gl.minimum(PER_COMPRESSED, 4) + p1 * gl.minimum(PER_COMPRESSED, 3)
    own = gl.convert_layout(own + p2 * gl.minimum(PER_COMPRESSED, 2) + p3, LAYOUT)
    if PER_COMPRESSED > 1:
        reach = p3 * (PER_COMPRESSED - 1)
        if PER_COMPRESSED > 2:
            reach += p2 * (PER_COMPRESSED - 2)
        if PER_COMPRESSED > 3:
            reach += p1 * (PER_COMPRESSED - 3)
        reach = gl.convert_layout(reach, LAYOUT)
        column = gl.arange(0, BLOCKS, gl.SliceLayout(0, LAYOUT))[None, :]
        before = gl.zeros([M, BLOCKS], gl.int32, LAYOUT) + gl.maximum(column - 1, 0)
        before = gl.gather(reach, before, 1)
        own += gl.where(column == 0, left_over[:, None], before)
        left_over = gl.sum(gl.where(column == BLOCKS - 1, reach, 0.0), 1)
    return own, left_over


@gluon.jit
def _for_least(top, best):
    """Replace the minimum of best [M, SLOTS] by top [M, 1] where that is larger."""
    least = gl.min(best, 1)[:, None]
    return gl.where((best == least) & (top > least), top, best)


@gluon.jit
def _merge(best, found):
    """Largest SLOTS of best [M, SLOTS] and found [M, BLOCKS], all different, unordered.

    Like `topk.merge`, it inserts better candidates one by one: in later tiles there are few.
    """
    beats = found > gl.min(best, 1)[:, None]
    count = gl.max(gl.sum(beats.to(gl.int32), 1), 0)
    for _ in range(gl.minimum(count, best.shape[1])):
        top = gl.max(found, 1)[:, None]
        best = _for_least(top, best)
        found = gl.where(found == top, ILLEGAL, found)
    return best


@gluon.jit
def _choose(
    given, SIDE: gl.constexpr, G: gl.constexpr, SPAN: gl.constexpr, CONFIG: gl.constexpr,
    SLOTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: score the first or the second half of each tile's blocks.

    The next head's scores are in flight while this head's probabilities are computed. The first
    warpgroup merges the best of both halves and writes them.
    """
    queries, keys, handed, blocks, place, scale2, index_mask = given
    q_at, lse2_at, q_full, q_empty = queries
    k_at, k_full, k_empty = keys
    best_at, open_at, handed_full, handed_empty = handed
    M: gl.constexpr = q_at.shape[3]
    N: gl.constexpr = k_at.shape[3]
    D: gl.constexpr = k_at.shape[4]
    TOGETHER: gl.constexpr = together(G)
    Q_STAGES: gl.constexpr = q_at.shape[0] // TOGETHER
    BLOCKS: gl.constexpr = N // STRIDES
    COUNT: gl.constexpr = CONFIG.select_count
    PER_COMPRESSED: gl.constexpr = SPAN.length // SPAN.stride
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    pooled: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, scores)
    by_best: gl.constexpr = gl.SliceLayout(1, pooled)

    column = gl.arange(0, BLOCKS, gl.SliceLayout(0, pooled))
    slot = gl.arange(0, SLOTS, gl.SliceLayout(0, pooled))[None, :]
    rows = gl.arange(0, M, by_row)
    zeros = gl.zeros([M, N], gl.float32, scores)
    n = 0  # stages of queries so far
    behind = 0  # steps of the tiles before
    for number in range(gl.program_id(0), place[3], gl.num_programs(0)):
        kv_head, sequence, first, steps, each, begin = _tile_at(number, place, M, BLOCKS, CONFIG)
        start = sequence.to(gl.int64) * place[0]
        ends = seen_end(begin + first + rows, SPAN)
        all_see = seen_end(begin + first, SPAN)
        best_t = first + gl.arange(0, M, by_best)
        own = (begin + best_t) // CONFIG.select_block
        # All different, and below whatever is found.
        best = gl.zeros([M, SLOTS], gl.int32, pooled) + (slot + SIDE * SLOTS + ILLEGAL)
        left_over = gl.zeros([M], gl.float32, by_best)
        to_open = gl.zeros([M], gl.float32, by_best)
        mine = each if SIDE == 0 else steps - each
        for step in range(mine):
            turn = behind + step
            stage = SIDE * STAGES + turn % STAGES
            k_tile = k_at.index(stage).reshape([N, D]).permute((1, 0))
            p = zeros
            mbarrier.wait(k_full.index(stage), (turn // STAGES) & 1)
            for _ in range(G // TOGETHER):
                at_q = n % Q_STAGES * TOGETHER
                mbarrier.wait(q_full.index(n % Q_STAGES), (n // Q_STAGES) & 1)
                s = _times_keys(q_at, at_q, k_tile, zeros)
                lse = lse2_at.index(at_q).reshape([M]).load(by_row)
                if TOGETHER == 2:
                    s_next = _times_keys(q_at, at_q + 1, k_tile, zeros)
                    lse_next = lse2_at.index(at_q + 1).reshape([M]).load(by_row)
                    s = warpgroup_mma_wait(1, deps=[s])
                    p += gl.exp2(s * scale2 - lse[:, None])
                    s, lse = s_next, lse_next
                s = warpgroup_mma_wait(0, deps=[s])
                mbarrier.arrive(q_empty.index(n % Q_STAGES))
                p += gl.exp2(s * scale2 - lse[:, None])
                n += 1
            mbarrier.arrive(k_empty.index(stage))
            at = SIDE * each + step
            if at * N + N > all_see:
                i = gl.arange(0, N, gl.SliceLayout(0, scores))
                key = at * N + i % BLOCKS * STRIDES + i // BLOCKS  # see `in_columns`
                p = gl.where(key[None, :] < ends[:, None], p, 0.0)
            importance, left_over = _pooled(p, left_over, PER_COMPRESSED, pooled)
            j = (at * BLOCKS + column)[None, :]
            found = candidates(importance, j, own, index_mask, False, CONFIG)
            if SIDE == 1:
                # The other warpgroup has the rest of the first block's importance and ranks it.
                opens = (column == 0)[None, :] & (step == 0)
                to_open += gl.sum(gl.where(opens, importance, 0.0), 1)
                found = gl.where(opens, ILLEGAL, found)
            best = _merge(best, found)
        over = (each - mine) * (G // TOGETHER)
        let_by(n, n + over, q_full, q_empty, Q_STAGES)
        n += over
        behind += mine

        if SIDE == 1:
            mbarrier.wait(handed_empty, (number // gl.num_programs(0) + 1) & 1)
            best_at.store(best)
            open_at.store(to_open)
            mbarrier.arrive(handed_full)
        else:
            mbarrier.wait(handed_full, number // gl.num_programs(0) & 1)
            others = best_at.load(pooled)
            to_open = open_at.load(by_best)
            mbarrier.arrive(handed_empty)
            if steps > each:
                importance = (to_open + left_over)[:, None]
                opening = candidates(importance, each * BLOCKS, own, index_mask, False, CONFIG)
                best = _for_least(opening, best)
                best = _merge(best, others)
            chosen = gl.where(best < ILLEGAL + 2 * SLOTS, NONE, indices(best, index_mask))
            for _ in range(SLOTS - COUNT):  # remove the least of the surplus slots
                least = gl.min(best, 1)[:, None]
                chosen = gl.where(best == least, NONE, chosen)
                best = gl.where(best == least, NONE, best)
            if steps == 0:
                chosen = gl.where(slot <= own[:, None], slot, NONE)
            rank = gl.zeros([M, SLOTS], gl.int32, pooled)
            for other in gl.static_range(SLOTS):
                index = gl.sum(gl.where(slot == other, chosen, 0), 1)[:, None]
                before = (index < chosen) | ((index == chosen) & (other < slot))
                rank += before.to(gl.int32)
            chosen = gl.where(chosen == NONE, -1, chosen)
            at_row = (start + best_t) * place[2] + kv_head
            to = blocks + at_row[:, None] * COUNT + rank
            gl.store(to, chosen, mask=(best_t < place[0])[:, None] & (rank < COUNT))


@gluon.jit
def scores_kernel(
    q, k, lse2, blocks, place, scale2, index_mask,
    G: gl.constexpr, SPAN: gl.constexpr, CONFIG: gl.constexpr, SLOTS: gl.constexpr,
    Q_STAGES: gl.constexpr, K_STAGES: gl.constexpr,
):  # fmt: skip
    """`topk._select_blocks` for dense sequences of up to 2^13 blocks; k's rows are `in_columns`."""
    M: gl.constexpr = q.block_shape[2]
    N: gl.constexpr = k.block_shape[2]
    q_at = room(q, Q_STAGES * together(G))
    lse2_at = room(lse2, Q_STAGES * together(G))
    k_at = room(k, 2 * K_STAGES)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    best_at = gl.allocate_shared_memory(gl.int32, [M, SLOTS], plain)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    open_at = gl.allocate_shared_memory(gl.float32, [M], line)
    q_full, q_empty = ring(Q_STAGES, 2)
    k_full, k_empty = ring(2 * K_STAGES, 1)
    handed_full, handed_empty = ring(1, 1)
    handed = best_at, open_at, handed_full.index(0), handed_empty.index(0)
    queries, keys = (q_at, lse2_at, q_full, q_empty), (k_at, k_full, k_empty)
    given = queries, keys, handed, blocks, place, scale2, index_mask
    gl.warp_specialize(
        [
            (_choose, (given, 0, G, SPAN, CONFIG, SLOTS, K_STAGES)),
            (_choose, (given, 1, G, SPAN, CONFIG, SLOTS, K_STAGES)),
            (_fetch_keys, (k, k_at, k_full, k_empty, place, M, CONFIG, K_STAGES)),
            (_fetch_queries, (q, lse2, queries, place, G, N // STRIDES, CONFIG, Q_STAGES)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
