"""Forward of the compressed and the window branch by specialized warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.kernels.common import weighed
from nsa.kernels.hopper.parts import (
    key_steps,
    let_by,
    once,
    query_tile,
    ring,
    room,
    store,
)
from nsa.kernels.span_common import sees


@gluon.jit
def _fetch_forward(q, k, v, held, place, first, base, steps, STAGES: gl.constexpr):
    """The warp that fetches: a warpgroup's queries each, then keys, and values, a step."""
    q_at, k_at, v_at, loaded, k_full, k_empty, v_full, v_empty = held
    sequence, head, kv_head = place
    M: gl.constexpr = q.block_shape[2]
    N: gl.constexpr = k.block_shape[2]
    mbarrier.expect(loaded, 2 * M * q.block_shape[3] * 2)
    for side in gl.static_range(2):
        where = [sequence, head, first + side * M, 0]
        tma.async_copy_global_to_shared(q, where, loaded, q_at.index(side))
    for n in range(steps):
        stage = n % STAGES
        free = (n // STAGES + 1) & 1
        where = [sequence, kv_head, base + n * N, 0]
        mbarrier.wait(k_empty.index(stage), free)
        mbarrier.expect(k_full.index(stage), N * k.block_shape[3] * 2)
        tma.async_copy_global_to_shared(k, where, k_full.index(stage), k_at.index(stage))
        mbarrier.wait(v_empty.index(stage), free)
        mbarrier.expect(v_full.index(stage), N * v.block_shape[3] * 2)
        tma.async_copy_global_to_shared(v, where, v_full.index(stage), v_at.index(stage))


@gluon.jit
def _attend(
    held, out, mix, first, base, steps, ends, scale2,
    SIDE: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup that computes: o and lse2 of its half of the queries.

    The product of a step's scores is in flight with that of the probabilities before.
    """
    q_at, k_at, v_at, loaded, k_full, k_empty, v_full, v_empty = held
    o, o_stride, lse2 = out
    tokens, keys = ends
    M: gl.constexpr = q_at.shape[3]
    N: gl.constexpr = k_at.shape[3]
    D: gl.constexpr = q_at.shape[4]
    DV: gl.constexpr = v_at.shape[4]
    dtype: gl.constexpr = v_at.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, scores)
    by_sum: gl.constexpr = gl.SliceLayout(1, sums)

    first += SIDE * M
    low, high, whole_low, whole_high = key_steps(first, M, base, steps, tokens, keys, N, SPAN)
    t = first + gl.arange(0, M, by_row)
    i = gl.arange(0, N, gl.SliceLayout(0, scores))
    q_tile = q_at.index(SIDE).reshape([M, D])
    m = gl.full([M], float("-inf"), gl.float32, by_row)
    acc = gl.zeros([M, DV], gl.float32, sums)
    mbarrier.wait(loaded, 0)
    let_by(0, low, k_full, k_empty, STAGES)
    let_by(0, low, v_full, v_empty, STAGES)
    stage = low % STAGES
    mbarrier.wait(k_full.index(stage), (low // STAGES) & 1)
    s = warpgroup_mma(
        q_tile, k_at.index(stage).reshape([N, D]).permute((1, 0)),
        gl.zeros([M, N], gl.float32, scores), use_acc=False, is_async=True,
    )  # fmt: skip
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(stage))
    seen = sees(t[:, None], (base + low * N + i)[None, :], SPAN)
    p, m, _ = weighed(gl.where(seen, s, float("-inf")), scale2, m)
    total = gl.sum(p, 1)
    p16 = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, sums, 2))
    for n in range(low + 1, high):
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
        if (n < whole_low) | (n >= whole_high):
            seen = sees(t[:, None], (base + n * N + i)[None, :], SPAN)
            s = gl.where(seen, s, float("-inf"))
        p, m, rescale = weighed(s, scale2, m)
        total = total * rescale + gl.sum(p, 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(before))
        acc = acc * gl.convert_layout(rescale, by_sum)[:, None]
        p16 = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, sums, 2))
    stage = (high - 1) % STAGES
    mbarrier.wait(v_full.index(stage), ((high - 1) // STAGES) & 1)
    acc = warpgroup_mma(p16, v_at.index(stage).reshape([N, DV]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(stage))

    left = tokens - first
    total = gl.where(m == float("-inf"), 1.0, total)
    gl.store(lse2 + t, m + gl.log2(total), mask=t < tokens)
    acc = acc / gl.convert_layout(total, by_sum)[:, None]
    gates, gate_stride, branch, base_o, base_stride, base_branch = mix
    if gates is not None:
        rows = first + gl.arange(0, M, by_sum)
        at_gates = gates + rows * gate_stride[0]
        of_branch = gl.load(at_gates + branch * gate_stride[2], mask=rows < tokens, other=0.0)
        acc = acc * of_branch.to(gl.float32)[:, None]
        if base_o is not None:
            d = gl.arange(0, DV, gl.SliceLayout(0, sums))
            at_base = base_o + rows[:, None] * base_stride + d[None, :]
            other = gl.load(at_base, mask=rows[:, None] < tokens, other=0.0).to(gl.float32)
            if base_branch >= 0:
                at_gates += base_branch * gate_stride[2]
                of_base = gl.load(at_gates, mask=rows < tokens, other=0.0)
                other = other * of_base.to(gl.float32)[:, None]
            acc = acc + other
    store(o + SIDE * M * o_stride, o_stride, left, acc, sums)


@gluon.jit
def forward_kernel(
    q, k, v, o, lse2, gates, base_o, strides, tokens, keys, tiles, total, scale2,
    SIZES: gl.constexpr, SPAN: gl.constexpr, BRANCH: gl.constexpr, BASE_BRANCH: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """`span_fwd._span_forward` of dense sequences with values; strides: of o, gates and base_o."""
    M: gl.constexpr = q.block_shape[2]
    N: gl.constexpr = k.block_shape[2]
    head, sequence, first, base, steps = query_tile(tokens, keys, tiles, SIZES.HQ, M, N, SPAN)

    q_at = room(q, 2)
    k_at = room(k, STAGES)
    v_at = room(v, STAGES)
    loaded = once()
    k_full, k_empty = ring(STAGES)
    v_full, v_empty = ring(STAGES)

    start = sequence.to(gl.int64) * tokens
    of_o, of_gates, of_base = strides
    o += (start + first) * of_o[0] + head.to(gl.int64) * of_o[1]
    lse2 += head.to(gl.int64) * total + start
    gate_stride = (0, 0, 0)
    base_stride = 0
    if gates is not None:
        gates += start * of_gates[0] + head.to(gl.int64) * of_gates[1]
        gate_stride = of_gates
        if base_o is not None:
            base_o += start * of_base[0] + head.to(gl.int64) * of_base[1]
            base_stride = of_base[0]
    held = q_at, k_at, v_at, loaded, k_full, k_empty, v_full, v_empty
    out = o, of_o[0], lse2
    mix = gates, gate_stride, BRANCH, base_o, base_stride, BASE_BRANCH
    ends = tokens, keys
    gl.warp_specialize(
        [
            (_attend, (held, out, mix, first, base, steps, ends, scale2, 0, SPAN, STAGES)),
            (_attend, (held, out, mix, first, base, steps, ends, scale2, 1, SPAN, STAGES)),
            (_fetch_forward, (q, k, v, held, (sequence, head, head // SIZES.G), first, base, steps,
                              STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
