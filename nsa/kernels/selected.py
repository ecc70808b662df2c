"""What the selected kernels share: where a tile lies, its rows, its keys and their scores."""

import triton
import triton.language as tl

from nsa.kernels.common import locate


@triton.jit
def place(
    axis, union, rivals, sizes,
    TOKENS: tl.constexpr, PIECES: tl.constexpr, RATIO: tl.constexpr,
    DECIDE: tl.constexpr, LARGE: tl.constexpr, HEADS: tl.constexpr, SLOTS: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Where this program's tile lies.

    Returns (first row of the sequence, its rows, first token in it, KV head, first head of the
    group, the tile's union as pointers to blocks and members, and its size; -1 when a tile of the
    other size has this place).

    Tokens are the fastest axis: the keys and values of one KV head fit in the L2 cache.
    """
    program = tl.program_id(0)
    tile = program % sizes[0]
    chunks = tl.cdiv(sizes[2], HEADS)
    kv_head = program // sizes[0] // chunks
    head = (program // sizes[0]) % chunks * HEADS
    _, start, rows, first = locate(
        tile // PIECES, axis[0], axis[1], axis[2], TOKENS * PIECES, PACKED
    )
    at = tile.to(tl.int64) * sizes[1] + kv_head
    count = tl.load(union[2] + at)
    if DECIDE:
        # By the unions of the large tile before this one, so that nothing a token gets depends on
        # later tokens, not even the order of its sums; neighbours are alike. The first is large.
        before = tl.maximum(tile // PIECES - 1, 0).to(tl.int64)
        piece = tl.arange(0, 16)  # no large tile has more tokens
        small = tl.load(
            rivals[1] + (before * RATIO + piece) * sizes[1] + kv_head, mask=piece < RATIO, other=0
        )
        large = tl.load(rivals[0] + before * sizes[1] + kv_head)
        pays = (first == 0) | (large * rivals[2] <= tl.sum(small, 0))
        count = tl.where(pays == LARGE, count, -1)
    first += tile % PIECES * TOKENS
    return start, rows, first, kv_head, head, union[0] + at * SLOTS, union[1] + at * SLOTS, count


@triton.jit
def tile_rows(start, rows, first, kv_head, head, group, TOKENS: tl.constexpr, HEADS: tl.constexpr,
              ROWS: tl.constexpr):  # fmt: skip
    """(token's number in the tile, position, row of the token axis, query head, valid), [ROWS]."""
    r = tl.arange(0, ROWS)
    token = r // HEADS
    in_group = head + r % HEADS
    position = first + token
    valid = (token < TOKENS) & (in_group < group) & (position < rows)
    return token, position, start + position, kv_head * group + in_group, valid


@triton.jit
def load_rows(x, row, head, valid, strides, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """x [tokens, HQ, D] at (row, head): [ROWS, BLOCK_D], 0 where not valid."""
    d = tl.arange(0, BLOCK_D)
    at = row.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    mask = valid[:, None]
    if D < BLOCK_D:
        mask = mask & (d < D)[None, :]
    return tl.load(x + at[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(x, values, row, head, valid, strides, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes values [ROWS, BLOCK_D] to x [tokens, HQ, D] at (row, head)."""
    d = tl.arange(0, BLOCK_D)
    at = row.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    mask = valid[:, None]
    if D < BLOCK_D:
        mask = mask & (d < D)[None, :]
    tl.store(x + at[:, None] + d[None, :], values.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_keys(x, first, left, strides, KEYS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [first, first + KEYS) of one head x of k or v: [KEYS, BLOCK_D], 0 from row `left` on."""
    n = tl.arange(0, KEYS)
    d = tl.arange(0, BLOCK_D)
    mask = (n < left)[:, None]
    if D < BLOCK_D:
        mask = mask & (d < D)[None, :]
    x += first * strides[0]
    return tl.load(x + (n * strides[0])[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def block_scores(q, k, token, position, member, first_key, width, scale2, KEYS: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """Base-2 scores [ROWS, KEYS] of keys [first_key, first_key + width), -inf where not seen.

    A row sees a block when its token's bit of `member` is set, and there the keys up to its
    position: one bound a row.
    """
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
    last = tl.minimum(position - first_key, width - 1)
    last = tl.where(((member >> token) & 1) == 1, last, -1)
    return tl.where(tl.arange(0, KEYS)[None, :] <= last[:, None], s, float("-inf"))
