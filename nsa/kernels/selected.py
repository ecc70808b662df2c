"""How selected attention is cut into tiles of queries, for its forward and for dQ.

A tile is some neighbouring tokens of one sequence times the heads of one KV head, and walks the
union of its tokens' blocks. Large tiles pay where neighbours select alike, small ones where they do
not. Both kinds are launched everywhere, and every program finds out from the sizes of the unions
whether its kind has this place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common import LOG2E, axis_arguments, locate, power_of_two, precision
from nsa.kernels.sequences import Sequences
from nsa.kernels.tiles import Tile, architecture
from nsa.kernels.unions import Unions, unions

MOST_ROWS = 64  # of a large tile: what one wgmma takes
COST = 1.6  # time of a block in a large tile over its time in a small one
SIZES = ("small", "large")


@dataclass(frozen=True)
class Plan:
    """The unions of the small tiles and, unless a small tile is as large as they get, of the large.

    `heads` of a group share a tile; a larger group is cut.
    """

    group: int
    heads: int
    small: Unions
    large: Unions | None

    @property
    def pieces(self) -> int:
        """Small tiles in a large one."""
        return self.large.tokens_per_tile // self.small.tokens_per_tile if self.large else 1

    def tensors(self) -> list[Tensor]:
        """What `from_tensors` takes, with the same group."""
        return self.small.tensors() + (self.large.tensors() if self.large else [])

    @classmethod
    def from_tensors(cls, tensors: list[Tensor], group: int) -> "Plan":
        heads, small, large = tile_tokens(group)
        sizes = [small] + [large] * (len(tensors) > 3)
        found = [Unions(n, *tensors[3 * i : 3 * i + 3]) for i, n in enumerate(sizes)]
        return cls(group, heads, found[0], found[1] if len(found) > 1 else None)


def tile_tokens(group: int, most_rows: int = MOST_ROWS) -> tuple[int, int, int]:
    """(heads, tokens of a small tile, tokens of a large tile) for a group of query heads."""
    heads = min(group, MOST_ROWS)
    small = max(1, 16 // heads)
    large = min(16, max(1, most_rows // heads))
    return heads, small, large - large % small


def plan(
    blocks: Tensor, sequences: Sequences, group: int, *, most_rows: int = MOST_ROWS
) -> Plan:
    """Tiles for blocks [tokens, HKV, N] int32 and `group` query heads a KV head."""
    heads, small, large = tile_tokens(group, most_rows)
    pieces = large // small
    return Plan(
        group,
        heads,
        unions(blocks, sequences, small, pieces),
        unions(blocks, sequences, large) if pieces > 1 else None,
    )


class Launch(NamedTuple):
    """One kernel's launch over all tiles of one size."""

    grid: tuple[int]
    union: tuple[Tensor, Tensor, Tensor]  # blocks, members, counts
    rivals: tuple  # counts of large tiles and of small ones, and what a large one's block costs
    axis: tuple
    sizes: tuple[int, int, int, int]  # tiles, HKV, G, select_block
    constants: dict


def launches(
    kernel: str,
    q: Tensor,
    v: Tensor,
    plan: Plan,
    sequences: Sequences,
    force: str | None,
    cost: float | None,
    tile: Mapping[str, Tile] | None,
) -> list[Launch]:
    """The launches of a kernel over the plan's tiles: of both sizes, or of the one in `force`."""
    if force not in (None, *SIZES):
        raise ValueError(f"force={force!r} is neither None nor one of {', '.join(SIZES)}")
    decide = plan.large is not None and force is None
    sizes = ["small"] if plan.large is None else [force] if force else list(SIZES)
    made = []
    for size in sizes:
        union = getattr(plan, size)
        pieces = plan.pieces if size == "small" else 1
        axis, count = axis_arguments(sequences.tokens, union.tokens_per_tile * pieces)
        kv_heads = union.counts.shape[1]
        rows = power_of_two(union.tokens_per_tile * plan.heads)
        select_block = sequences.config.select_block
        chosen = (tile or {}).get(size) or default_tile(kernel, rows, q, v, select_block)
        dims = q.shape[2], v.shape[2]
        made.append(
            Launch(
                (count * pieces * kv_heads * triton.cdiv(plan.group, plan.heads),),
                (union.blocks, union.members, union.counts),
                ((plan.large or plan.small).counts, plan.small.counts, float(cost or COST)),
                axis,
                (count * pieces, kv_heads, plan.group, select_block),
                dict(
                    TOKENS=union.tokens_per_tile, PIECES=pieces, RATIO=plan.pieces,
                    DECIDE=decide, LARGE=size == "large", HEADS=plan.heads, ROWS=rows,
                    SLOTS=union.blocks.shape[2], KEYS=chosen.keys,
                    PARTS=triton.cdiv(select_block, chosen.keys),
                    D=dims[0], DV=dims[1],
                    BLOCK_D=power_of_two(dims[0]), BLOCK_DV=power_of_two(dims[1]),
                    PACKED=sequences.tokens.packed, PRECISION=precision(q),
                    num_warps=chosen.warps, num_stages=chosen.stages,
                ),
            )
        )  # fmt: skip
    return made


def scale_base2(scale: float) -> float:
    return scale * LOG2E


def key_tile(select_block: int, most: int = 64) -> int:
    """Keys that a program loads at a time: a block, or part of a large one."""
    return min(power_of_two(select_block), most)


def default_tile(kernel: str, rows: int, q: Tensor, v: Tensor, select_block: int) -> Tile:
    """The tile of "forward", "dq" or "dkdv" for so many rows."""
    widest = power_of_two(max(q.shape[2], v.shape[2]))
    heavy = widest * q.element_size()  # bytes of a key
    hopper = architecture(q.device) >= 90
    keys = key_tile(select_block, 64 if heavy <= 512 else 32)
    warps = 4
    if rows >= 64 and widest > 128:
        warps = 8
    if heavy > 512 or (heavy > 256 and not hopper):
        return Tile(rows, keys, warps, 1)
    return Tile(rows, keys, warps, 3 if hopper and heavy <= 256 else 2)


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
