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
from torch import Tensor

from nsa.kernels.common import axis_arguments, power_of_two, precision
from nsa.kernels.selected_tiles import default_tile
from nsa.kernels.sequences import Sequences
from nsa.kernels.tiles import Tile
from nsa.kernels.unions import Unions, nested_unions

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


def plan(blocks: Tensor, sequences: Sequences, group: int, *, most_rows: int = MOST_ROWS) -> Plan:
    """Tiles for blocks [tokens, HKV, N] int32 and `group` query heads a KV head."""
    heads, small, large = tile_tokens(group, most_rows)
    return Plan(group, heads, *nested_unions(blocks, sequences, small, large // small))


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
    # Rows of more than 512 bytes leave no room for a large tile in an SM.
    only_small = plan.large is None or max(q.shape[2], v.shape[2]) * q.element_size() > 512
    decide = not only_small and force is None
    sizes = ["small"] if only_small else [force] if force else list(SIZES)
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
                {
                    "TOKENS": union.tokens_per_tile, "PIECES": pieces, "RATIO": plan.pieces,
                    "DECIDE": decide, "LARGE": size == "large", "HEADS": plan.heads, "ROWS": rows,
                    "SLOTS": union.blocks.shape[2], "KEYS": chosen.keys,
                    "PARTS": triton.cdiv(select_block, chosen.keys),
                    "D": dims[0], "DV": dims[1],
                    "BLOCK_D": power_of_two(dims[0]), "BLOCK_DV": power_of_two(dims[1]),
                    "PACKED": sequences.tokens.packed, "PRECISION": precision(q),
                    "num_warps": chosen.warps, "num_stages": chosen.stages,
                },
            )
        )  # fmt: skip
    return made
