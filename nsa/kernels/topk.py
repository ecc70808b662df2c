"""Scores and top n in one kernel: importance is pooled and ranked without writing T x NB.

Nothing of size T x C or T x NB exists outside registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.blocks import compressed_span
from nsa.config import NSAConfig
from nsa.kernels.common import (
    LOG2E,
    MOST_BITS,
    axis_arguments,
    extent,
    locate,
    next_power_of_two,
    position_of,
    power_of_two,
    precision,
)
from nsa.kernels.hopper import launches
from nsa.kernels.launch import launch
from nsa.kernels.ranking import ILLEGAL, NONE, candidates, indices, merge
from nsa.kernels.sequences import Sequences
from nsa.kernels.span_common import descriptors_fit, load_tile, operand, seen_end
from nsa.kernels.tiles import Tile, architecture


@triton.jit
def pool(p, left_over, PER_COMPRESSED: tl.constexpr, PER_SELECTABLE: tl.constexpr):
    """Eq. 9 where a tile of keys is a whole number of blocks: (importance [M, BLOCKS], left_over).

    A key counts in the block where it begins, and its part in the next block counts there;
    left_over [M] is the part in the next tile.
    """
    BLOCK_M: tl.constexpr = p.shape[0]
    BLOCK_N: tl.constexpr = p.shape[1]
    BLOCKS: tl.constexpr = BLOCK_N // PER_SELECTABLE
    place = (tl.arange(0, BLOCK_N) % PER_SELECTABLE)[None, :]
    own = p * tl.minimum(PER_COMPRESSED, PER_SELECTABLE - place).to(tl.float32)
    own = tl.sum(tl.reshape(own, [BLOCK_M, BLOCKS, PER_SELECTABLE]), 2)
    if PER_COMPRESSED > 1:
        reach = (place + PER_COMPRESSED - PER_SELECTABLE).to(tl.float32)
        reach = tl.where(reach > 0, p * reach, 0.0)
        reach = tl.sum(tl.reshape(reach, [BLOCK_M, BLOCKS, PER_SELECTABLE]), 2)
        column = tl.zeros([BLOCK_M, 1], tl.int32) + tl.arange(0, BLOCKS)[None, :]
        before = tl.gather(reach, tl.maximum(column - 1, 0), 1)
        own += tl.where(column == 0, left_over[:, None], before)
        left_over = tl.sum(tl.where(column == BLOCKS - 1, reach, 0.0), 1)
    return own, left_over


@triton.jit
def band(keys, blocks, PER_COMPRESSED: tl.constexpr, PER_SELECTABLE: tl.constexpr):
    """Strides that keys [N] and blocks [BLOCKS] share, fp32 (`nsa.blocks.overlap`)."""
    key = keys[:, None]
    start = (blocks * PER_SELECTABLE)[None, :]
    low = tl.maximum(key, start)
    high = tl.minimum(key + PER_COMPRESSED, start + PER_SELECTABLE)
    return tl.maximum(high - low, 0).to(tl.float32)


@triton.jit
def _probabilities(
    queries, k_tile, n, back, scale2, G: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr
):
    """Sum over a group's heads of the probabilities of a tile of keys, [M, N] fp32; 0 if unseen.

    queries: (q, its strides, place, first token, the group's first head, pointers [M] to that
    head's statistics, their stride by head, end of each row's keys). n: the first key. back: 1
    to process the heads from the last to the first, 0 otherwise.
    """
    q, q_strides, token_place, first, head, lse2, total, ends = queries
    BLOCK_M: tl.constexpr = ends.shape[0]
    BLOCK_N: tl.constexpr = k_tile.shape[0]
    p = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    valid = first + tl.arange(0, BLOCK_M) < token_place[2]
    k_tile = tl.trans(k_tile)  # out here, or it would be put into shared memory for every head
    for i in range(G):
        g = i + back * (G - 1 - 2 * i)
        lse = tl.load(lse2 + g.to(tl.int64) * total, mask=valid, other=0.0)
        q_tile = load_tile(q, q_strides, token_place, first, head + g, D, BLOCK_M)
        s = tl.dot(q_tile, k_tile, input_precision=PRECISION)
        p += tl.exp2(s * scale2 - lse[:, None])
    if n + BLOCK_N > tl.min(ends, 0):
        key = n + tl.arange(0, BLOCK_N)
        p = tl.where(key[None, :] < ends[:, None], p, 0.0)
    return p


@triton.jit
def _select_blocks(
    q, k_cmp, lse2, blocks, q_strides, k_strides, tokens, keys, tiles, total, scale2, index_mask,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, CONFIG: tl.constexpr,
    SPAN: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr, ALIGNED: tl.constexpr,
    WIDE: tl.constexpr, BLOCKS: tl.constexpr, SLOTS: tl.constexpr, PRECISION: tl.constexpr,
    POOLING: tl.constexpr,
):  # fmt: skip
    """One program: TILE.rows neighbouring queries of one sequence and the heads of one KV head.

    tokens: (table, bounds, length, starts) of the queries' axis; keys: (bounds, length) of the
    keys'.
    Late tiles, which see the most keys, start first.
    """
    BLOCK_M: tl.constexpr = TILE.rows
    BLOCK_N: tl.constexpr = TILE.keys
    SELECT: tl.constexpr = CONFIG.select_block
    COUNT: tl.constexpr = CONFIG.select_count
    PER_COMPRESSED: tl.constexpr = SPAN.length // SPAN.stride
    PER_SELECTABLE: tl.constexpr = SELECT // SPAN.stride
    tile = tiles - 1 - tl.program_id(0) // HKV
    kv_head = tl.program_id(0) % HKV
    sequence, start, rows, first = locate(tile, tokens[0], tokens[1], tokens[2], BLOCK_M, PACKED)
    if first >= rows:
        return
    key_start, key_rows = extent(sequence, keys[0], keys[1], PACKED)
    token_place, key_place = (sequence, start, rows), (sequence, key_start, key_rows)
    position = position_of(sequence, tokens[3])
    last = position + tl.minimum(first + BLOCK_M, rows) - 1
    t = first + tl.arange(0, BLOCK_M)
    own = (position + t) // SELECT
    slot = tl.arange(0, SLOTS)[None, :]
    legal = last // SELECT + 1
    if legal <= COUNT:
        chosen = tl.where(slot <= own[:, None], slot, NONE)
    else:
        ends = seen_end(position + t, SPAN)
        end = tl.minimum(seen_end(last, SPAN), key_rows)
        head = kv_head * G
        lse2_at = lse2 + head.to(tl.int64) * total + start + t
        queries = q, q_strides, token_place, first, head, lse2_at, total, ends
        best = tl.full([BLOCK_M, SLOTS], ILLEGAL, tl.int64 if WIDE else tl.int32)
        left_over = tl.zeros([BLOCK_M], tl.float32)
        for block in range(0, legal, BLOCKS):
            n = block * PER_SELECTABLE
            # L2 still holds the part of q read last. Sums in one order tie if keys do,
            # which 16-bit inputs do not need: their importance is rounded.
            back = 0 if WIDE else block // BLOCKS % 2
            if ALIGNED:
                k_tile = load_tile(k_cmp, k_strides, key_place, n, kv_head, D, BLOCK_N)
                p = _probabilities(queries, k_tile, n, back, scale2, G, D, PRECISION)
                importance, left_over = pool(p, left_over, PER_COMPRESSED, PER_SELECTABLE)
            else:
                importance = tl.zeros([BLOCK_M, BLOCKS], tl.float32)
                low = tl.maximum(n - PER_COMPRESSED + 1, 0)
                for m in range(low, tl.minimum(n + BLOCKS * PER_SELECTABLE, end), BLOCK_N):
                    k_tile = load_tile(k_cmp, k_strides, key_place, m, kv_head, D, BLOCK_N)
                    p = _probabilities(queries, k_tile, m, back, scale2, G, D, PRECISION)
                    key, j = m + tl.arange(0, BLOCK_N), block + tl.arange(0, BLOCKS)
                    shared = band(key, j, PER_COMPRESSED, PER_SELECTABLE)
                    importance = tl.dot(p, shared, importance, input_precision=POOLING)
            j = (block + tl.arange(0, BLOCKS))[None, :]
            found = candidates(importance, j, own, index_mask, WIDE, CONFIG)
            best = merge(best, found, SLOTS)
        chosen = tl.where(slot >= SLOTS - COUNT, indices(best, index_mask), NONE)
        chosen = tl.sort(chosen)
    chosen = tl.where(chosen == NONE, -1, chosen)
    to = blocks + ((start + t).to(tl.int64) * HKV + kv_head)[:, None] * COUNT + slot
    tl.store(to, chosen, mask=(t < rows)[:, None] & (slot < COUNT))


def default_tile(dim: int, like: Tensor) -> Tile:
    """Default tile of `select_blocks`: two programs per SM overlap products and exp2."""
    wide = power_of_two(dim)
    hopper = architecture(like.device) >= 90
    if like.dtype == torch.float32:
        return Tile(32, 64 if wide <= 64 else 32, 4, 1 if wide > 128 else 2)
    if wide <= 128:
        return Tile(64, 128, 8, 3 if hopper else 2)
    return Tile(64, 128, 8, 2) if hopper else Tile(64, 64, 4, 2)


def _pooling(keys: int, config: NSAConfig) -> tuple[bool, int]:
    """(aligned, blocks): blocks that a step scores, and True if `keys` keys are exactly those."""
    per_compressed = config.compress_block // config.compress_stride
    per_selectable = config.select_block // config.compress_stride
    if per_selectable & (per_selectable - 1) == 0 and keys >= 4 * per_selectable:
        return True, keys // per_selectable

    def wasted(blocks: int) -> float:
        needed = blocks * per_selectable
        return -(-(needed + per_compressed - 1) // keys) * keys / needed

    return False, min((64, 32, 16), key=wasted)


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    lse2: Tensor,
    sequences: Sequences,
    scale: float,
    *,
    tile: Tile | None = None,
    descriptors: bool | None = None,
    specialized: bool | None = None,
) -> Tensor:
    """Blocks that each query selects (Eq. 8-11): [tokens, HKV, n] int32, ascending, -1 last.

    q [tokens, HQ, D]; k_cmp [C rows, HKV, D]; lse2 [HQ, tokens] fp32 of the compressed branch, as
    span_forward returns it. tile: default_tile's if None. descriptors: fetch the tiles
    by TMA; None: if possible. specialized: use the warp-specialized kernel; None: if faster.
    """
    total, heads, dim = q.shape
    kv_heads, config = k_cmp.shape[1], sequences.config
    count = config.select_count
    blocks = torch.empty(total, kv_heads, count, dtype=torch.int32, device=q.device)
    by_warps = launches.scores_tile(specialized, sequences, q, k_cmp)
    if by_warps is not None:
        launches.launch_scores(q, k_cmp, lse2, blocks, sequences, scale, tile or by_warps)
        return blocks
    tile = tile or default_tile(dim, q)
    place, tiles = axis_arguments(sequences.queries, tile.rows)
    if not tiles:
        return blocks
    bits = sequences.index_bits
    wide = q.dtype == torch.float32 or bits > MOST_BITS
    aligned, step = _pooling(tile.keys, config)
    tokens, keys = sequences.queries, sequences.compressed
    if descriptors is None:
        descriptors = descriptors_fit(tokens, keys, q, k_cmp)
    # Scores and probabilities of such a tile leave room for two programs of 8 warps on an SM.
    small = q.element_size() == 2 and tile.rows * tile.keys <= 64 * 128 and dim <= 128
    launch(
        _select_blocks, (tiles * kv_heads,),
        operand(q, tokens, tile.rows, descriptors),
        operand(k_cmp, keys, tile.keys, descriptors),
        lse2, blocks, q.stride()[:2], k_cmp.stride()[:2],
        place, (keys.bounds, keys.length), tiles, total, scale * LOG2E,
        2**31 - 1 if wide else 2**bits - 1,
        HKV=kv_heads, G=heads // kv_heads, D=dim, CONFIG=config, SPAN=compressed_span(config),
        TILE=tile, PACKED=tokens.packed, ALIGNED=aligned, WIDE=wide,
        BLOCKS=step, SLOTS=max(2, next_power_of_two(count)),
        PRECISION=precision(q), POOLING="ieee" if q.dtype == torch.float32 else "tf32x3",
        num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=128 if small and tile.warps == 8 else None,
    )  # fmt: skip
    return blocks
