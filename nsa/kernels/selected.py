"""Code shared by the selected kernels: location of a tile, its rows, its keys, their scores."""

import triton
import triton.language as tl

from nsa.kernels.common import extent, locate, padded, position_of

LANES = tl.constexpr(32)  # of a warp
SHORT = tl.constexpr(2)  # blocks, see `rounds`


@triton.jit
def place(axis, rivals, sizes, WALK: tl.constexpr):
    """Location of this program's tile, or the first of PIECES if they are merged.

    axis: (table, bounds, length, starts) of the queries, then (bounds, length) of the keys if they
    have another axis. Returns (sequence, its first row, its rows, first token in it, KV head, first
    head of the group, number of the tile, True if this program has work: False where tiles of the
    other size are used, (first row of its keys, their rows, position of its first row)).

    Tokens are the fastest axis: the keys and values of one KV head fit in the L2 cache.
    """
    TOKENS: tl.constexpr = WALK.tokens
    PIECES: tl.constexpr = WALK.pieces
    program = tl.program_id(0)
    tile = program % sizes[0]
    chunks = tl.cdiv(sizes[2], WALK.heads)
    kv_head = program // sizes[0] // chunks
    head = (program // sizes[0]) % chunks * WALK.heads
    MERGED: tl.constexpr = WALK.merged
    whole, piece = tile, 0
    if not MERGED:
        whole, piece = tile // PIECES, tile % PIECES
    sequence, start, rows, first = locate(
        whole, axis[0], axis[1], axis[2], TOKENS * PIECES, WALK.packed
    )
    key_start, key_rows = start, rows
    if axis[3] is not None:
        key_start, key_rows = extent(sequence, axis[4], axis[5], WALK.packed)
    along = key_start, key_rows, position_of(sequence, axis[3])
    mine = first + piece * TOKENS < rows
    if WALK.decide:
        RATIO: tl.constexpr = WALK.ratio
        # By the unions of the large tile before this one, so that nothing a token gets depends on
        # later tokens, not even the order of its sums; neighbours are alike. The first is large.
        before = tl.maximum(whole - 1, 0).to(tl.int64)
        each = tl.arange(0, 16)  # no large tile has more tokens
        small = tl.load(
            rivals[1] + (before * RATIO + each) * sizes[1] + kv_head, mask=each < RATIO, other=0
        )
        large = tl.load(rivals[0] + before * sizes[1] + kv_head)
        pays = (first == 0) | (large * rivals[2] <= tl.sum(small, 0))
        mine = mine & (pays == WALK.large)
    first += piece * TOKENS
    tile = whole * PIECES + piece
    return sequence, start, rows, first, kv_head, head, tile, mine, along


@triton.jit
def union_of(union, tile, kv_head, kv_heads, WALK: tl.constexpr):
    """Blocks of a tile and their members, as arguments of `of_union`, and their number."""
    at = tile.to(tl.int64) * kv_heads + kv_head
    blocks = union[0] + at * WALK.slots
    members = union[1] + at * WALK.slots
    if WALK.slots <= LANES:
        n = tl.arange(0, LANES)
        blocks = tl.load(blocks + n, mask=n < WALK.slots, other=0)
        if WALK.tokens > 1:
            members = tl.load(members + n, mask=n < WALK.slots, other=0)
    return blocks, members, tl.load(union[2] + at)


@triton.jit
def of_union(blocks, members, i, count, WALK: tl.constexpr):
    """(block, its members) number i of a union.

    A warp holds a short list in its lanes, which are cheaper to read than memory.
    """
    if WALK.slots <= LANES:
        asked = tl.arange(0, LANES) == i
        block = tl.sum(tl.where(asked, blocks, 0), 0)
        member = 1
        if WALK.tokens > 1:
            member = tl.sum(tl.where(asked, members, 0), 0)
    else:
        block = tl.load(blocks + i, mask=i < count, other=0)
        member = tl.load(members + i, mask=i < count, other=0)
    return block, member


@triton.jit
def tile_rows(start, rows, first, begin, kv_head, head, group, WALK: tl.constexpr):
    """(token's number in the tile, position, row of the token axis, query head, valid), [ROWS].

    begin: position of the sequence's first row.
    """
    r = tl.arange(0, WALK.rows)
    token = r // WALK.heads
    in_group = head + r % WALK.heads
    place = first + token
    valid = (token < WALK.tokens) & (in_group < group) & (place < rows)
    return token, begin + place, start + place, kv_head * group + in_group, valid


@triton.jit
def delta_left(
    product, gates, deltas, row, heads, valid, sees_any, strides, total, BRANCH: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    """(<do, o> of a branch, 0 if a row sees no key or the gate is 0; its gate), by row, fp32.

    The remainder of `product`, <do, o> of the gated sum, after deltas [HQ, total] of the branches
    OTHERS, weighted by their gates. gates None: this is the only branch.
    """
    gate = valid.to(tl.float32)
    if gates is not None:
        at_gates = gates + row.to(tl.int64) * strides[0] + heads.to(tl.int64) * strides[1]
        for n in tl.static_range(len(OTHERS)):
            other = tl.load(at_gates + OTHERS[n] * strides[2], mask=valid, other=0.0)
            delta = tl.load(deltas[n] + heads.to(tl.int64) * total + row, mask=valid, other=0.0)
            product -= other.to(tl.float32) * delta
        gate = tl.load(at_gates + BRANCH * strides[2], mask=valid, other=0.0).to(tl.float32)
    weighs = sees_any & (gate != 0.0)
    return tl.where(weighs, product / tl.where(weighs, gate, 1.0), 0.0), gate


@triton.jit
def rounds(first, select_block, SLOTS: tl.constexpr, TOKENS: tl.constexpr):
    """Number of passes over dq of a tile of TOKENS after `first`: 2 if they see few keys.

    Then the terms cancel, and the rounding error of delta is no longer small compared to them.
    Independent of the actual blocks: no token's result depends on later tokens.
    """
    few = first < select_block * SHORT
    if SLOTS <= SHORT * TOKENS:
        few = first >= 0
    return tl.where(few, 2, 1)


@triton.jit
def load_rows(x, row, head, valid, strides, D: tl.constexpr, WIDE: tl.constexpr = True):
    """x [tokens, HQ, D] at (row, head): [ROWS, padded D], 0 where not valid.

    WIDE: True if its offsets may need 64 bits.
    """
    d = tl.arange(0, padded(D))
    if WIDE:
        row, head = row.to(tl.int64), head.to(tl.int64)
    at = row * strides[0] + head * strides[1]
    mask = valid[:, None]
    if padded(D) > D:
        mask = mask & (d < D)[None, :]
    return tl.load(x + at[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(x, values, row, head, valid, strides, D: tl.constexpr):
    """Write values [ROWS, padded D] to x [tokens, HQ, D] at (row, head)."""
    d = tl.arange(0, padded(D))
    at = row.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    mask = valid[:, None]
    if padded(D) > D:
        mask = mask & (d < D)[None, :]
    tl.store(x + at[:, None] + d[None, :], values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def of_head(x, start, kv_head, strides):
    """Argument x of `load_block`: pointer to row `start` of one head of k or v, or descriptor."""
    if not isinstance(x, tl.tensor_descriptor):
        x += start * strides[0] + kv_head.to(tl.int64) * strides[1]
    return x


@triton.jit
def load_block(x, sequence, kv_head, first, left, strides, KEYS: tl.constexpr, D: tl.constexpr):
    """Rows [first, first + KEYS) of a sequence's keys or values, x being from `of_head`."""
    if isinstance(x, tl.tensor_descriptor):
        tile = x.load([sequence, kv_head, first, 0]).reshape(KEYS, padded(D))
    else:
        tile = load_keys(x, first.to(tl.int64), left, strides, KEYS, D)
    return tile


@triton.jit
def load_keys(x, first, left, strides, KEYS: tl.constexpr, D: tl.constexpr):
    """Rows [first, first + KEYS) of one head x of k or v, padded to [KEYS, *]; 0 past `left`."""
    n = tl.arange(0, KEYS)
    d = tl.arange(0, padded(D))
    mask = (n < left)[:, None]
    if padded(D) > D:
        mask = mask & (d < D)[None, :]
    x += first * strides[0]
    return tl.load(x + (n * strides[0])[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def block_scores(q, k, token, position, member, first_key, width, PRECISION: tl.constexpr):
    """q k [ROWS, KEYS] of keys [first_key, first_key + width), -inf where not seen."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    last = last_seen(token, position, member, first_key, width)
    return tl.where(tl.arange(0, k.shape[0])[None, :] <= last[:, None], s, float("-inf"))


@triton.jit
def last_seen(token, position, member, first_key, width):
    """The last of the keys [first_key, first_key + width) that each row sees, -1 for none.

    A row sees a block if its token's bit of `member` is set, and in it the keys up to its
    position: one bound per row.
    """
    last = tl.minimum(position - first_key, width - 1)
    return tl.where(((member >> token) & 1) == 1, last, -1)
