"""Warp-specialized forward of the compressed and the window branch."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.kernels.common import fixed_point, sunk, truncated, weighed
from nsa.kernels.hopper.parts import (
    fetch_queries,
    fetch_step,
    key_steps,
    let_by,
    load,
    query_tile,
    ring,
    room,
    store,
)
from nsa.kernels.span_common import sees


@gluon.jit
def _fetch_keys(
    k, v, fetched, place, SIZES: gl.constexpr, ROWS: gl.constexpr, SPAN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Producer warp: fetch keys and values step by step."""
    N: gl.constexpr = k.block_shape[2]
    n = 0
    for number in range(gl.program_id(0), place[3], gl.num_programs(0)):
        tile = query_tile(number, place, SIZES.HQ, ROWS, N, SPAN)
        for step in range(tile[4]):
            where = [tile[1], tile[0] // SIZES.G, tile[3] + step * N, 0]
            fetch_step(k, v, where, fetched, n, 0, STAGES, STAGES)
            n += 1


@gluon.jit
def _attend(
    given,
    SIDE: gl.constexpr, SIZES: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
    BRANCH: gl.constexpr, BASE_BRANCH: gl.constexpr,
):  # fmt: skip
    """Consumer warpgroup: o and lse2 of its half of each tile's queries.

    A step's score product overlaps with the previous step's product of probabilities and values.
    """
    queries, fetched, out, mix, strides, place, total_rows, scale2 = given
    q_at, q_full, q_empty = queries
    k_at, v_at, k_full, k_empty, v_full, v_empty = fetched
    o, o_unit, lse2 = out
    gates, base_o, base_unit, sink2 = mix
    of_o, of_gates, of_base = strides
    tokens, keys = place[0], place[1]
    M: gl.constexpr = q_at.shape[3]
    N: gl.constexpr = k_at.shape[3]
    D: gl.constexpr = q_at.shape[4]
    DV: gl.constexpr = v_at.shape[4]
    dtype: gl.constexpr = v_at.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, scores)
    by_sum: gl.constexpr = gl.SliceLayout(1, sums)

    q_tile = q_at.index(SIDE).reshape([M, D])
    i = gl.arange(0, N, gl.SliceLayout(0, scores))
    behind = 0  # steps of the tiles before
    for number in range(gl.program_id(0), place[3], gl.num_programs(0)):
        head, sequence, first, base, steps, begin = query_tile(number, place, SIZES.HQ, M, N, SPAN)
        first += SIDE * M
        low, high, whole_low, whole_high = key_steps(
            begin + first, M, base, steps, begin + tokens, keys, N, SPAN
        )
        t = first + gl.arange(0, M, by_row)
        position = begin + t
        m = gl.full([M], float("-inf"), gl.float32, by_row)
        acc = gl.zeros([M, DV], gl.float32, sums)
        let_by(behind, behind + low, k_full, k_empty, STAGES)
        let_by(behind, behind + low, v_full, v_empty, STAGES)
        n = behind + low
        stage = n % STAGES
        mbarrier.wait(q_full.index(SIDE), number // gl.num_programs(0) & 1)
        mbarrier.wait(k_full.index(stage), (n // STAGES) & 1)
        s = warpgroup_mma(
            q_tile, k_at.index(stage).reshape([N, D]).permute((1, 0)),
            gl.zeros([M, N], gl.float32, scores), use_acc=False, is_async=True,
        )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage))
        seen = sees(position[:, None], (base + low * N + i)[None, :], SPAN)
        p, m, rescale = weighed(gl.where(seen, s, float("-inf")), scale2, m)
        total = gl.sum(p, 1)
        p = truncated(p, dtype)
        kept = gl.sum(p, 1)
        p16 = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, sums, 2))
        for step in range(low + 1, high):
            n = behind + step
            stage = n % STAGES
            before = (n - 1) % STAGES
            mbarrier.wait(k_full.index(stage), (n // STAGES) & 1)
            s = warpgroup_mma(
                q_tile, k_at.index(stage).reshape([N, D]).permute((1, 0)),
                gl.zeros([M, N], gl.float32, scores), use_acc=False, is_async=True,
            )  # fmt: skip
            mbarrier.wait(v_full.index(before), ((n - 1) // STAGES) & 1)
            acc = warpgroup_mma(p16, v_at.index(before).reshape([N, DV]), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(stage))
            if (step < whole_low) | (step >= whole_high):
                seen = sees(position[:, None], (base + step * N + i)[None, :], SPAN)
                s = gl.where(seen, s, float("-inf"))
            p, m, rescale = weighed(s, scale2, m)
            total = total * rescale + gl.sum(p, 1)
            p = truncated(p, dtype)
            kept = kept * rescale + gl.sum(p, 1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(before))
            acc = acc * gl.convert_layout(rescale, by_sum)[:, None]
            p16 = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, sums, 2))
        mbarrier.arrive(q_empty.index(SIDE))
        n = behind + high - 1
        stage = n % STAGES
        mbarrier.wait(v_full.index(stage), (n // STAGES) & 1)
        acc = warpgroup_mma(p16, v_at.index(stage).reshape([N, DV]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(stage))
        let_by(behind + high, behind + steps, k_full, k_empty, STAGES)
        let_by(behind + high, behind + steps, v_full, v_empty, STAGES)
        behind += steps

        start = sequence.to(gl.int64) * tokens
        wide_head = head.to(gl.int64)
        total = gl.where(m == float("-inf"), 1.0, total)
        kept = gl.where(m == float("-inf"), 1.0, kept)
        gl.store(lse2 + wide_head * total_rows + start + t, m + gl.log2(total), mask=t < tokens)
        if sink2 is not None:
            kept = sunk(kept, m + gl.log2(total), gl.load(sink2 + head))
        acc = acc / gl.convert_layout(kept, by_sum)[:, None]
        rows = first + gl.arange(0, M, by_sum)
        statistics = wide_head * total_rows + start + rows
        if gates is not None:
            at_gates = gates + start * of_gates[0] + wide_head * of_gates[1] + rows * of_gates[0]
            of_branch = gl.load(at_gates + BRANCH * of_gates[2], mask=rows < tokens, other=0.0)
            acc = acc * of_branch.to(gl.float32)[:, None]
            if base_o is not None:
                at_base = base_o + (start + first) * of_base[0] + wide_head * of_base[1]
                other = load(at_base, of_base[0], tokens - first, sums, DV)
                if base_unit is not None:
                    unit = gl.load(base_unit + statistics, mask=rows < tokens, other=0.0)
                    other = other * unit[:, None]
                if BASE_BRANCH >= 0:
                    at_gates += BASE_BRANCH * of_gates[2]
                    of_base_o = gl.load(at_gates, mask=rows < tokens, other=0.0)
                    other = other * of_base_o.to(gl.float32)[:, None]
                acc = acc + other
        if o_unit is not None:
            acc, unit = fixed_point(acc)
            gl.store(o_unit + statistics, unit, mask=rows < tokens)
        at_o = o + (start + first) * of_o[0] + wide_head * of_o[1]
        store(at_o, of_o[0], tokens - first, acc)


@gluon.jit
def forward_kernel(
    q, k, v, o, o_unit, lse2, gates, base_o, base_unit, sink2, strides, place, total, scale2,
    SIZES: gl.constexpr, SPAN: gl.constexpr, BRANCH: gl.constexpr, BASE_BRANCH: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """`span_fwd._span_forward` for dense sequences with values; strides: of o, gates and base_o.

    place: as in `parts.query_tile`.
    """
    M: gl.constexpr = q.block_shape[2]
    N: gl.constexpr = k.block_shape[2]
    q_at = room(q, 2)
    k_at = room(k, STAGES)
    v_at = room(v, STAGES)
    q_full, q_empty = ring(2, 1)
    k_full, k_empty = ring(STAGES, 2)
    v_full, v_empty = ring(STAGES, 2)

    queries = q_at, q_full, q_empty
    fetched = k_at, v_at, k_full, k_empty, v_full, v_empty
    out, mix = (o, o_unit, lse2), (gates, base_o, base_unit, sink2)
    given = queries, fetched, out, mix, strides, place, total, scale2
    gl.warp_specialize(
        [
            (_attend, (given, 0, SIZES, SPAN, STAGES, BRANCH, BASE_BRANCH)),
            (_attend, (given, 1, SIZES, SPAN, STAGES, BRANCH, BASE_BRANCH)),
            (_fetch_keys, (k, v, fetched, place, SIZES, M, SPAN, STAGES)),
            (fetch_queries, (q, None, q_at, None, q_full, q_empty, place, SIZES, N, SPAN)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
