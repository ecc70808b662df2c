"""Code shared by the warp-specialized kernels: tiles, barriers, loads and stores.

Persistent programs, one per SM, process tiles of queries one after the other; a tile of keys, which
is long, has its own program. Producer warps fetch by TMA, and two consumer warpgroups compute, each
half of a tile's rows. They synchronize only by barriers in shared memory: a stage is `full` once
its bytes have arrived, and `empty` once its readers are done. So one warpgroup computes
exponentials, or writes a tile's results, while the other's products run, and the next tile's first
rows are prefetched. P and dS go from the registers of one product into the next.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from nsa.kernels.common import in_units
from nsa.kernels.span_common import query_tile as of_span
from nsa.kernels.span_common import seen_end, seen_start


@gluon.jit
def query_tile(number, place, HQ: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
               SPAN: gl.constexpr):  # fmt: skip
    """(head, sequence, first token, first key, steps of KEYS keys, position of the sequence's first
    token) of a tile of 2 ROWS tokens.

    place: (tokens, keys, tiles of tokens, tiles of all heads, starts). As `span_common.query_tile`,
    for dense sequences; a tile has at least one step.
    """
    tokens, keys, tiles, _, starts = place
    on_tokens, on_keys = (None, None, tokens, starts), (None, keys)
    head, at, _, first, seen, _ = of_span(
        number, on_tokens, on_keys, tiles, HQ, SPAN, 2 * ROWS, False
    )
    steps = gl.cdiv(seen[1] - seen[0], KEYS)
    return head, at[0], first, seen[0], gl.maximum(steps, 1), at[3]


@gluon.jit
def key_steps(
    first, ROWS: gl.constexpr, base, steps, tokens, keys, KEYS: gl.constexpr, SPAN: gl.constexpr
):
    """(low, high, whole low, whole high): steps of KEYS keys after `base`, at least one, that some
    of ROWS rows from position `first` on see, and those that every row sees completely."""
    last = gl.minimum(first + ROWS, tokens) - 1
    low = gl.minimum((seen_start(first, SPAN) - base) // KEYS, steps - 1)
    high = gl.cdiv(gl.maximum(gl.minimum(seen_end(last, SPAN), keys) - base, 0), KEYS)
    high = gl.minimum(gl.maximum(high, low + 1), steps)
    whole_low = gl.cdiv(seen_start(last, SPAN) - base, KEYS)
    whole_high = gl.maximum(gl.minimum(seen_end(first, SPAN), keys) - base, 0) // KEYS
    return low, high, whole_low, whole_high


@gluon.jit
def room(x, COUNT: gl.constexpr):
    """Shared memory for COUNT blocks of a descriptor."""
    shape: gl.constexpr = [COUNT] + x.block_shape  # noqa: RUF005  Gluon knows no star
    return gl.allocate_shared_memory(x.dtype, shape, x.layout)


@gluon.jit
def once():
    """Barrier for a single fetch."""
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    return loaded


@gluon.jit
def ring(STAGES: gl.constexpr, READERS: gl.constexpr):
    """Barriers (full, empty) of each stage: its data has arrived, its readers are done."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return full, empty


@gluon.jit
def fetch_step(k, v, where, fetched, n, RING: gl.constexpr, K_STAGES: gl.constexpr,
               V_STAGES: gl.constexpr):  # fmt: skip
    """Fetch keys and values of step n, each to its stage of ring RING once that is empty."""
    k_at, v_at, k_full, k_empty, v_full, v_empty = fetched
    N: gl.constexpr = k.block_shape[2]
    stage = RING * K_STAGES + n % K_STAGES
    mbarrier.wait(k_empty.index(stage), (n // K_STAGES + 1) & 1)
    mbarrier.expect(k_full.index(stage), N * k.block_shape[3] * 2)
    tma.async_copy_global_to_shared(k, where, k_full.index(stage), k_at.index(stage))
    stage = RING * V_STAGES + n % V_STAGES
    mbarrier.wait(v_empty.index(stage), (n // V_STAGES + 1) & 1)
    mbarrier.expect(v_full.index(stage), N * v.block_shape[3] * 2)
    tma.async_copy_global_to_shared(v, where, v_full.index(stage), v_at.index(stage))


@gluon.jit
def fetch_queries(
    q, do, q_at, do_at, full, empty, place,
    SIZES: gl.constexpr, KEYS: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    """Producer warp: fetch each tile's queries, and dO if it is given, half by half."""
    ROWS: gl.constexpr = q.block_shape[2]
    for number in range(gl.program_id(0), place[3], gl.num_programs(0)):
        tile = query_tile(number, place, SIZES.HQ, ROWS, KEYS, SPAN)
        turn = number // gl.num_programs(0)
        for side in gl.static_range(2):
            where = [tile[1], tile[0], tile[2] + side * ROWS, 0]
            bar = full.index(side)
            mbarrier.wait(empty.index(side), (turn + 1) & 1)
            if do is None:
                mbarrier.expect(bar, ROWS * q.block_shape[3] * 2)
            else:
                mbarrier.expect(bar, ROWS * (q.block_shape[3] + do.block_shape[3]) * 2)
                tma.async_copy_global_to_shared(do, where, bar, do_at.index(side))
            tma.async_copy_global_to_shared(q, where, bar, q_at.index(side))


@gluon.jit
def let_by(begin, end, full, empty, STAGES: gl.constexpr):
    """Skip the steps [begin, end), of which this warpgroup sees nothing."""
    for n in range(begin, end):
        stage = n % STAGES
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        mbarrier.arrive(empty.index(stage))


@gluon.constexpr_function
def wide(D, dtype):
    """Layout of [64, D] with 16-byte accesses of device memory per lane.

    For 16-bit dtypes a lane has 8 neighbours of a row, in the warp that has them in a product, so
    that only lanes of a warp exchange them. For fp32 it is the layout of a product.
    """
    if dtype == gl.float32:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    columns = [[0, column] for column in (32, 64) if column < D]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *columns], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, D],
    )  # fmt: skip


@gluon.jit
def _at(x, stride, rows, D: gl.constexpr):
    """(pointers to x's first 64 rows of D columns, mask of those before `rows`), `wide`."""
    LAYOUT: gl.constexpr = wide(D, x.dtype.element_ty)
    i = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    d = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))[None, :]
    return x + i * stride + d, i < rows


@gluon.jit
def load(x, stride, rows, LAYOUT: gl.constexpr, D: gl.constexpr):
    """[64, D] of x, int16 in its units, as fp32 in a product's layout; 0 past the first `rows`."""
    at, there = _at(x, stride, rows, D)
    found = gl.convert_layout(gl.load(at, mask=there, other=0), LAYOUT)
    return in_units(found) if x.dtype.element_ty == gl.int16 else found.to(gl.float32)


@gluon.jit
def store(x, stride, rows, values):
    """Write values [64, D] of a product to the first `rows` rows of x."""
    at, there = _at(x, stride, rows, values.shape[1])
    LAYOUT: gl.constexpr = wide(values.shape[1], x.dtype.element_ty)
    gl.store(at, gl.convert_layout(values.to(x.dtype.element_ty), LAYOUT), mask=there)
