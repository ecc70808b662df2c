"""Division of selected attention into tiles of queries, for its forward and for dQ.

A tile is some neighbouring tokens of one sequence times the heads of one KV head, and walks the
union of its tokens' blocks. Large tiles are faster if neighbours select similar blocks, small ones
if not. In long sequences both kinds are launched everywhere, and every program determines from the
sizes of the unions which kind is used at its location.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.kernels.common import axis_arguments, ceil_div, power_of_two, precision
from nsa.kernels.sequences import Axis, Sequences
from nsa.kernels.span_common import descriptors_fit, operand
from nsa.kernels.tiles import Tile, default_cost, default_tile, processors
from nsa.kernels.unions import Layout, Unions, laid_out, nested_unions

MOST_ROWS = 64  # of a large tile: the rows of one wgmma
MERGED = 16  # tiles to a processor from which on a program takes all small ones of a large one's
BOTH = 1.05  # relative cost of launching tiles of both sizes instead of one
SIZES = ("small", "large")


@dataclass(frozen=True)
class Plan:
    """Unions of the small tiles and, unless small tiles have the maximum size, of the large ones.

    `heads` of a group share a tile; a larger group is divided. All unions are in `workspace`,
    int32, which a forward keeps for its backward.
    """

    group: int
    heads: int
    workspace: Tensor
    small: Unions
    large: Unions | None

    @property
    def largest(self) -> Unions:
        """Unions of the largest tiles."""
        return self.large or self.small

    @property
    def pieces(self) -> int:
        """Number of small tiles in a large one."""
        return self.large.tokens_per_tile // self.small.tokens_per_tile if self.large else 1

    def always_large(self, blocks: int, forced: int, cost: float) -> bool:
        """True if large tiles are faster for this many blocks even with random queries.

        Those share the `forced` blocks that all select, and others only by chance. cost: cost of a
        block in a large tile relative to a small one.
        """
        if self.large is None:
            return False
        slots = self.small.blocks.shape[2] // self.small.tokens_per_tile
        chosen, others = max(0, slots - forced), max(1, blocks - forced)

        def union(tokens: int) -> float:
            return forced + others * (1 - (1 - min(1.0, chosen / others)) ** tokens)

        small, large = self.small.tokens_per_tile, self.large.tokens_per_tile
        return union(large) * cost <= union(small) * self.pieces * BOTH


@lru_cache(maxsize=256)
def tile_tokens(group: int) -> tuple[int, int, int]:
    """(heads, tokens of a small tile, tokens of a large tile) for a group of query heads."""
    heads = min(group, MOST_ROWS)
    large = min(16, max(1, MOST_ROWS // heads))
    # As many tokens as fit 16 rows, or a few less if large tiles are then larger.
    most = max(1, 16 // heads)
    small = min(range(most // 2 + 1, most + 1), key=lambda n: (large % n, -n))
    return heads, small, large - large % small


def layout_of(tokens: Axis, kv_heads: int, slots: int, group: int) -> Layout:
    """Memory layout of a plan with `slots` slots per token and `group` query heads per KV head."""
    _, small, large = tile_tokens(group)
    return laid_out(tokens, kv_heads, slots, small, large // small)


def plan(blocks: Tensor, sequences: Sequences, group: int) -> Plan:
    """Plan tiles for blocks [tokens, HKV, N] int32 and `group` query heads per KV head."""
    heads, small, large = tile_tokens(group)
    return Plan(group, heads, *nested_unions(blocks, sequences, small, large // small))


def kept_plan(workspace: Tensor, blocks: Tensor, sequences: Sequences, group: int) -> Plan:
    """Restore the result of `plan` for the same blocks, sequences and group from its workspace."""
    layout = layout_of(sequences.queries, *blocks.shape[1:], group)
    return Plan(group, tile_tokens(group)[0], workspace, *layout.of(workspace))


class Walk(NamedTuple):
    """Compile-time parameters of a kernel's walk over tiles of one size."""

    tokens: int  # of a tile
    pieces: int  # tiles of this size in a large one
    merged: bool  # one program processes all pieces
    ratio: int  # small tiles in a large one
    decide: bool  # a program determines if its size is used here
    large: bool
    heads: int  # of a group, that share a tile
    rows: int  # tokens by heads, padded
    slots: int  # of a union
    keys: int  # fetched at a time
    parts: int  # of this many keys per block
    d: int
    dv: int
    packed: bool
    precision: str  # of the products
    turned: bool  # keys are the rows of the products
    early: bool  # dq prefetches a block a round early


class Launch(NamedTuple):
    """Launch of one kernel over all tiles of one size."""

    grid: tuple[int]
    keys: Tensor | TensorDescriptor
    values: Tensor | TensorDescriptor
    union: tuple[Tensor, Tensor, Tensor]  # blocks, members, counts
    rivals: tuple  # counts of large tiles and of small ones, and what a large one's block costs
    axis: tuple
    sizes: tuple[int, int, int, int]  # tiles, HKV, G, select_block
    walk: Walk
    options: dict  # num_warps and num_stages


def launches(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    sequences: Sequences,
    force: str | None,
    cost: float | None,
    tile: Mapping[str, Tile] | None,
    descriptors: bool | None,
) -> list[Launch]:
    """Launches of a kernel over the plan's tiles: of both sizes, or only of `force`."""
    if force not in (None, *SIZES):
        raise ValueError(f"force={force!r} is neither None nor one of {', '.join(SIZES)}")
    # Rows of more than 512 bytes leave no room for a large tile in an SM.
    only_small = plan.large is None or max(q.shape[2], v.shape[2]) * q.element_size() > 512
    tokens, queries, config = sequences.tokens, sequences.queries, sequences.config
    select_block, forced = config.select_block, config.select_initial + config.select_local
    cost = float(cost or default_cost(kernel, q, v))
    if only_small:
        sizes = ["small"]
    elif force:
        sizes = [force]
    elif plan.always_large(ceil_div(tokens.length, select_block), forced, cost):
        sizes = ["large"]
    else:
        sizes = list(SIZES)
    kv_heads, chunks = k.shape[1], ceil_div(plan.group, plan.heads)
    made = []
    for size in sizes:
        union = getattr(plan, size)
        rows = power_of_two(union.tokens_per_tile * plan.heads)
        chosen = (tile or {}).get(size) or default_tile(kernel, rows, q, v, select_block)
        pieces = plan.pieces if size == "small" else 1
        axis, count = axis_arguments(queries, union.tokens_per_tile * pieces)
        axis += () if queries is tokens else (tokens.bounds, tokens.length)
        merged = pieces > 1 and count * kv_heads * chunks >= MERGED * processors(q.device)
        if not merged:
            count *= pieces
        programs = count * kv_heads * chunks
        fetched = descriptors
        if fetched is None:
            # A descriptor may read past the end of a block.
            fetched = select_block % chosen.keys == 0 and descriptors_fit(tokens, tokens, k, v)
        made.append(
            Launch(
                (programs,),
                operand(k, tokens, chosen.keys, fetched),
                operand(v, tokens, chosen.keys, fetched),
                (union.blocks, union.members, union.counts),
                (plan.largest.counts, plan.small.counts, cost),
                axis,
                (count, kv_heads, plan.group, select_block),
                Walk(
                    tokens=union.tokens_per_tile,
                    pieces=pieces,
                    merged=merged,
                    ratio=plan.pieces,
                    decide=len(sizes) > 1,
                    large=size == "large",
                    heads=plan.heads,
                    rows=rows,
                    slots=union.blocks.shape[2],
                    keys=chosen.keys,
                    parts=ceil_div(select_block, chosen.keys),
                    d=q.shape[2],
                    dv=v.shape[2],
                    packed=tokens.packed,
                    precision=precision(q),
                    turned=chosen.turned,
                    # It costs registers, which is slower for a short list or few programs.
                    early=union.blocks.shape[2] > 64 and programs >= MERGED * processors(q.device),
                ),
                {"num_warps": chosen.warps, "num_stages": chosen.stages},
            )
        )
    return made
