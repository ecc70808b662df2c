"""How selected attention is cut into tiles of queries, for its forward and for dQ.

A tile is some neighbouring tokens of one sequence times the heads of one KV head, and walks the
union of its tokens' blocks. Large tiles pay where neighbours select alike, small ones where they do
not. Both kinds are launched everywhere, and every program finds out from the sizes of the unions
whether its kind has this place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.kernels.common import axis_arguments, ceil_div, power_of_two, precision
from nsa.kernels.selected_tiles import default_tile
from nsa.kernels.sequences import Sequences
from nsa.kernels.span_common import descriptors_fit, operand, processors
from nsa.kernels.tiles import Tile
from nsa.kernels.unions import Unions, nested_unions

MOST_ROWS = 64  # of a large tile: what one wgmma takes
# Time of a block in a large tile over its time in a small one.
COST = {"forward": 1.4, "dq": 1.4}
MERGED = 16  # tiles to a processor from which on a program takes all small ones of a large one's
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


def tile_tokens(group: int) -> tuple[int, int, int]:
    """(heads, tokens of a small tile, tokens of a large tile) for a group of query heads."""
    heads = min(group, MOST_ROWS)
    small = max(1, 16 // heads)
    large = min(16, max(1, MOST_ROWS // heads))
    return heads, small, large - large % small


def plan(blocks: Tensor, sequences: Sequences, group: int) -> Plan:
    """Tiles for blocks [tokens, HKV, N] int32 and `group` query heads a KV head."""
    heads, small, large = tile_tokens(group)
    return Plan(group, heads, *nested_unions(blocks, sequences, small, large // small))


class Launch(NamedTuple):
    """One kernel's launch over all tiles of one size."""

    grid: tuple[int]
    keys: Tensor | TensorDescriptor
    values: Tensor | TensorDescriptor
    union: tuple[Tensor, Tensor, Tensor]  # blocks, members, counts
    rivals: tuple  # counts of large tiles and of small ones, and what a large one's block costs
    axis: tuple
    sizes: tuple[int, int, int, int]  # tiles, HKV, G, select_block
    constants: dict


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
    """The launches of a kernel over the plan's tiles: of both sizes, or of the one in `force`."""
    if force not in (None, *SIZES):
        raise ValueError(f"force={force!r} is neither None nor one of {', '.join(SIZES)}")
    # Rows of more than 512 bytes leave no room for a large tile in an SM.
    only_small = plan.large is None or max(q.shape[2], v.shape[2]) * q.element_size() > 512
    decide = not only_small and force is None
    sizes = ["small"] if only_small else [force] if force else list(SIZES)
    tokens, select_block = sequences.tokens, sequences.config.select_block
    kv_heads, chunks = k.shape[1], ceil_div(plan.group, plan.heads)
    made = []
    for size in sizes:
        union = getattr(plan, size)
        rows = power_of_two(union.tokens_per_tile * plan.heads)
        chosen = (tile or {}).get(size) or default_tile(kernel, rows, q, v, select_block)
        pieces = plan.pieces if size == "small" else 1
        axis, count = axis_arguments(tokens, union.tokens_per_tile * pieces)
        merged = pieces > 1 and count * kv_heads * chunks >= MERGED * processors(q.device)
        if not merged:
            count *= pieces
        fetched = descriptors
        if fetched is None:
            # Nothing keeps a descriptor from reading on past the end of a block.
            fetched = select_block % chosen.keys == 0 and descriptors_fit(tokens, tokens, k, v)
        made.append(
            Launch(
                (count * kv_heads * chunks,),
                operand(k, tokens, chosen.keys, fetched),
                operand(v, tokens, chosen.keys, fetched),
                (union.blocks, union.members, union.counts),
                ((plan.large or plan.small).counts, plan.small.counts, float(cost or COST[kernel])),
                axis,
                (count, kv_heads, plan.group, select_block),
                {
                    "TOKENS": union.tokens_per_tile, "PIECES": pieces, "MERGED": merged,
                    "RATIO": plan.pieces, "DECIDE": decide, "LARGE": size == "large",
                    "HEADS": plan.heads, "ROWS": rows, "SLOTS": union.blocks.shape[2],
                    "KEYS": chosen.keys, "PARTS": ceil_div(select_block, chosen.keys),
                    "D": q.shape[2], "DV": v.shape[2],
                    "BLOCK_D": power_of_two(q.shape[2]), "BLOCK_DV": power_of_two(v.shape[2]),
                    "PACKED": tokens.packed, "PRECISION": precision(q), "DESCRIPTORS": fetched,
                    "num_warps": chosen.warps, "num_stages": chosen.stages,
                },
            )
        )  # fmt: skip
    return made
