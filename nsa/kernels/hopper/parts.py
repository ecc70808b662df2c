"""What the kernels of specialized warps share: their tiles, barriers and results' way out.

One warp fetches by TMA and two warpgroups compute, each half of a program's rows. They meet at
barriers in shared memory alone: a stage is `full` once its bytes are there, and `empty` once both
warpgroups are done with it. So one takes exponentials while the other's products are under way. P
and dS go from the registers of one product into the next.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from nsa.kernels.span_common import query_tile as of_span
from nsa.kernels.span_common import seen_end, seen_start


@gluon.jit
def query_tile(
    tokens, keys, tiles, HQ: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    SPAN: gl.constexpr,
):  # fmt: skip
    """(head, sequence, first token, first key, steps of KEYS keys) of a program of 2 ROWS tokens.

    As `span_common.query_tile`, of dense sequences; a program has one step at least.
    """
    on_tokens, on_keys = (None, None, tokens), (None, keys)
    head, place, _, first, seen, _ = of_span(on_tokens, on_keys, tiles, HQ, SPAN, 2 * ROWS, False)
    steps = gl.cdiv(seen[1] - seen[0], KEYS)
    return head, place[0], first, seen[0], gl.maximum(steps, 1)


@gluon.jit
def key_steps(
    first, ROWS: gl.constexpr, base, steps, tokens, keys, KEYS: gl.constexpr, SPAN: gl.constexpr
):
    """(low, high, whole low, whole high): steps of KEYS keys from `base` on, at least one, that
    some of ROWS rows see, and those that every row sees all of."""
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
    """A barrier for what is fetched once."""
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    return loaded


@gluon.jit
def ring(STAGES: gl.constexpr):
    """(full, empty): of each stage, whether it is there and whether both are done with it."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    return full, empty


@gluon.jit
def let_by(begin, end, full, empty, STAGES: gl.constexpr):
    """Lets the steps [begin, end) go by, of which this warpgroup sees nothing."""
    for n in range(begin, end):
        stage = n % STAGES
        mbarrier.wait(full.index(stage), (n // STAGES) & 1)
        mbarrier.arrive(empty.index(stage))


@gluon.jit
def store(x, stride, rows, values, LAYOUT: gl.constexpr, ADD: gl.constexpr = False):
    """Writes values [N, D] to the rows before `rows` of x, or adds them to what is there."""
    i = gl.arange(0, values.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
    d = gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
    at = x + i * stride + d
    if ADD:
        values += gl.load(at, mask=i < rows, other=0.0).to(gl.float32)
    gl.store(at, values.to(x.dtype.element_ty), mask=i < rows)
