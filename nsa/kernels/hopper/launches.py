"""Choice and launches of the warp-specialized kernels.

These kernels are in Gluon, Triton's lower level, for Hopper only; the Triton kernels of `span_fwd`,
`span_bwd`, `selected_fwd`, `selected_dq` and `topk` run everywhere else, and are their reference.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.blocks import Span, compressed_span
from nsa.kernels.common import LOG2E, MOST_BITS, Sizes, ceil_div, next_power_of_two
from nsa.kernels.launch import compiles_for, launch
from nsa.kernels.selected_plan import Plan
from nsa.kernels.sequences import Axis, Sequences
from nsa.kernels.span_common import descriptors_fit, felt, line_operand, operand
from nsa.kernels.tiles import Tile, architecture, name_of, processors

TESTED = ("3.6", "3.7")  # versions of Triton that these were compiled with; Gluon is experimental
WIDTHS = 64, 128  # D and DV
HALF = 64  # rows of a warpgroup; a program has two
ENOUGH = 4  # tiles of queries to a processor, which takes them one after the other
CHOSEN = Tile(HALF, 64, 4, 3)  # of the selected branch
SCORED = Tile(HALF, 2 * HALF, 4, 2)  # by scores and top n; stages of two heads' queries
MOST_SLOTS = 32  # that they choose: these are in registers, and in shared memory once
# Least tiles of the selected branch per SM: they are short, and slower than Triton's if few.
MANY = {"selected": 60, "selected_dq": 30}
# Where memory is as fast as an H200's, Triton's small tiles of one token win on random queries from
# so many tokens on. On an H100 they do not.
ONE_TOKEN = {"selected": 65536, "selected_dq": 32768}
# By kernel, D and DV, and whether the span looks back: the tiles measured ahead of Triton's kernels
# on an H200 (the selected branch's on an H100 too), and from how many tokens of a sequence on.
FASTER: dict[tuple[str, int, bool], tuple[tuple[int, Tile], ...]] = {
    ("forward", 128, False): (
        (32768, Tile(2 * HALF, 128, 4, 2)),
        (8192, Tile(2 * HALF, 64, 4, 4)),
    ),
    ("forward", 128, True): ((2048, Tile(2 * HALF, 64, 4, 4)),),
    ("forward", 64, False): ((32768, Tile(2 * HALF, 128, 4, 3)),),
    ("dq", 128, False): ((8192, Tile(2 * HALF, 64, 4, 4)),),
    ("dq", 64, True): ((4096, Tile(2 * HALF, 64, 4, 4)),),
    ("dkdv", 128, False): ((8192, Tile(64, 2 * HALF, 4, 3)),),
    ("dkdv", 128, True): ((4096, Tile(64, 2 * HALF, 4, 3)),),
    ("dkdv", 64, False): ((16384, Tile(128, 2 * HALF, 4, 2)),),
    ("dkdv", 64, True): ((8192, Tile(64, 2 * HALF, 4, 3)),),
    ("scores", 128, False): ((16384, SCORED),),
    ("scores", 64, False): ((32768, SCORED),),
    ("selected", 128, False): ((8192, CHOSEN),),
    ("selected_dq", 128, False): ((4096, CHOSEN),),
}
ASKED = {  # if FASTER has none and they are requested explicitly
    "forward": Tile(2 * HALF, 64, 4, 4),
    "dq": Tile(2 * HALF, 64, 4, 4),
    "dkdv": Tile(64, 2 * HALF, 4, 3),
    "scores": SCORED,
    "selected": CHOSEN,
    "selected_dq": CHOSEN,
}


class Group(NamedTuple):
    """Tokens and heads of a tile of the selected branch, and the slots of its union."""

    tokens: int
    heads: int
    slots: int


def tile_for(
    kernel: str,
    asked: bool | None,
    span: Span | None,
    tokens: Axis,
    keys: Axis,
    operands: Sequence[Tensor],
) -> Tile | None:
    """Warp-specialized tile for "forward" of q, k, v, or "dq" or "dkdv" of these and do, or None.

    asked: the caller's choice; None leaves it to FASTER. span None: see `selected_tile`.

    Raises ValueError if warp specialization is requested and not supported.
    """
    if asked is False:
        return None
    q, _, v, *_ = operands
    looks_back = span is not None and span.lookback is not None
    tiles = FASTER.get((kernel, v.shape[2], looks_back), ())
    # Queries at an offset see as much as the last ones of a sequence that is as long as its keys.
    length = keys.length * span.stride if tokens.starts is not None and span else tokens.length
    found = next((tile for least, tile in tiles if length >= least), None)
    if asked is None:
        many = q.shape[0] * q.shape[1] >= ENOUGH * 2 * HALF * processors(q.device)
        taken = found and many and why_not(kernel, tokens, keys, operands) is None
        return found if taken else None
    if refusal := why_not(kernel, tokens, keys, operands):
        raise ValueError(f"{kernel} by specialized warps: {refusal}; None goes by speed")
    return found or ASKED[kernel]


def selected_tile(
    kernel: str,
    asked: bool | None,
    plan: Plan,
    sequences: Sequences,
    operands: Sequence[Tensor],
) -> Tile | None:
    """Same as `tile_for`, for the selected branch by `plan`: "selected" is its forward."""
    union, block = plan.largest, sequences.config.select_block
    rows = union.tokens_per_tile * plan.heads
    if plan.heads < plan.group or not HALF // 2 < rows <= HALF or block != CHOSEN.keys:
        if asked:
            raise ValueError(
                f"{kernel} by specialized warps: they take blocks of 64 keys and 33 to 64 rows a "
                f"tile, and these are {block}, {rows} of {plan.group} heads; None goes by speed"
            )
        return None
    device = operands[0].device
    few = union.counts.numel() < MANY[kernel] * processors(device)
    alone = plan.small.tokens_per_tile == 1 and sequences.tokens.length >= ONE_TOKEN[kernel]
    if asked is None and (few or (alone and "H200" in name_of(device))):
        return None
    return tile_for(kernel, asked, None, sequences.queries, sequences.tokens, operands)


def scores_tile(asked: bool | None, sequences: Sequences, q: Tensor, k: Tensor) -> Tile | None:
    """Same as `tile_for`, for scores and top n."""
    config, bits = sequences.config, sequences.index_bits
    few = bits <= MOST_BITS and config.select_count <= MOST_SLOTS
    if config.select_block != 4 * config.compress_stride or not few:
        if asked:
            raise ValueError(
                f"scores by specialized warps: they take {MOST_SLOTS} of {2**MOST_BITS} blocks of "
                f"four strides at most, and {config} has {sequences.selectable.length} blocks here"
            )
        return None
    return tile_for("scores", asked, None, sequences.queries, sequences.compressed, (q, k, k))


def why_not(kernel: str, tokens: Axis, keys: Axis, operands: Sequence[Tensor]) -> str | None:
    """Reason why these operands on these axes cannot be warp-specialized; None if they can."""
    q, _, v, *_ = operands
    if not compiles_for(q):
        return f"they are compiled for a GPU, and this is {q.device} or interpreted"
    if (chip := architecture(q.device)) != 90:
        return f"they are for Hopper, sm_90, and this is sm_{chip}"
    if not triton.__version__.startswith(TESTED):
        return f"Triton {triton.__version__} was not tested, but {', '.join(TESTED)}"
    if not q.shape[2] == v.shape[2] in WIDTHS:
        return f"D and DV are {q.shape[2]} and {v.shape[2]}, not both one of {WIDTHS}"
    if not descriptors_fit(tokens, keys, *operands):
        return "TMA takes dense sequences of 16-bit numbers with strides of 16 n bytes"
    if kernel in ("dkdv", "scores") and tokens.length % 4:
        return f"by TMA rows of statistics begin at 16 n bytes, and T is {tokens.length}"
    return None


@cache
def _layout(bits: int, rank: int):  # an NVMMASharedLayout
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(128 if bits == 16 else 0, bits, rank)


def _in_gluon(plain: TensorDescriptor | None):
    """Convert one of Triton's descriptors to Gluon's, without its checks."""
    from triton.experimental.gluon.nvidia import hopper

    if plain is None:
        return None
    made = object.__new__(hopper.TensorDescriptor)
    made.__dict__.update(vars(plain))
    made.layout = _layout(8 * plain.base.element_size(), len(plain.shape))
    made.padding = "zero"
    return made


def _tiles(x: Tensor, axis: Axis, rows: int):
    """Gluon descriptor of tiles of `rows` rows of x [axis, heads, D]."""
    return _in_gluon(operand(x, axis, rows, True))


def _lines(x: Tensor | None, axis: Axis, rows: int):
    """Gluon descriptor of lines of `rows` numbers of x [heads, axis] fp32."""
    return _in_gluon(line_operand(x, axis, rows, True))


def launch_dkdv(
    operands: Sequence[Tensor],
    lines: Sequence[Tensor | None],
    parts: Sequence[Tensor],
    span: Span,
    tokens: Axis,
    keys: Axis,
    scale: float,
    shares: tuple[int, int, int],
    tile: Tile,
) -> None:
    """dk and dv [parts, keys, HKV, D] of operands q, k, v, do and lines lse2, delta, gate.

    shares: (each, splits, together) of `span_bwd_kernels.dkdv_kernel`.
    """
    from nsa.kernels.hopper.dkdv import dkdv_kernel

    q, k, v, do = operands
    heads, kv_heads, (each, splits, together) = q.shape[1], k.shape[1], shares
    programs = heads // each * splits
    launch(
        dkdv_kernel, (keys.tile_count(tile.keys) * programs,),
        _tiles(q, tokens, tile.rows), _tiles(k, keys, tile.keys // 2),
        _tiles(v, keys, tile.keys // 2), _tiles(do, tokens, tile.rows),
        *(_lines(x, tokens, tile.rows) for x in lines), *parts,
        tuple((*x.stride()[1:3], x.stride(0)) for x in parts),
        tokens.length, keys.length, tokens.starts, scale, scale * LOG2E,
        SIZES=Sizes(heads, heads // kv_heads, q.shape[2], v.shape[2]), SPAN=felt(span, keys),
        EACH=each, SPLITS=splits, TOGETHER=together, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip


def launch_dq(
    operands: Sequence[Tensor],
    rows: tuple[Tensor, Tensor, Tensor | None],
    gated: tuple[Tensor | None, Tensor | None, int],
    dq: Tensor,
    span: Span,
    tokens: Axis,
    keys: Axis,
    scale: float,
    *,
    make_delta: bool,
    add: bool,
    tile: Tile,
) -> None:
    """dq [tokens, HQ, D] of operands q, k, v, do; rows: lse2, delta, kept.

    gated: gates, dgates, branch. make_delta, add: as in `span_bwd_kernels.dq_kernel`.
    """
    from nsa.kernels.hopper.dq import dq_kernel

    q, k, v, do = operands
    gates, dgates, branch = gated
    (total, heads, dim), tiles = q.shape, tokens.tile_count(tile.rows)
    launch(
        dq_kernel, (min(tiles * heads, processors(q.device)),),
        _tiles(q, tokens, tile.rows // 2), _tiles(k, keys, tile.keys), _tiles(v, keys, tile.keys),
        _tiles(do, tokens, tile.rows // 2), v, *rows, gates, dgates, dq,
        tuple(None if x is None else x.stride() for x in (v, gates, dgates, dq)),
        (tokens.length, keys.length, tiles, tiles * heads, tokens.starts), total,
        scale, scale * LOG2E,
        SIZES=Sizes(heads, heads // k.shape[1], dim, v.shape[2]), SPAN=felt(span, keys),
        BRANCH=branch, STAGES=tile.stages, MAKE_DELTA=make_delta, ADD=add, num_warps=tile.warps,
    )  # fmt: skip


def in_columns(k: Tensor, keys: Axis, size: int) -> tuple[Tensor, Axis]:
    """k [keys, HKV, D] reordered for the columns of the scores, and its axis.

    A tile of `size` keys has the first key of each block, then the second ones, and so on, so
    that the terms of a block's sum are in one lane's registers.
    """
    tiles = keys.tile_count(size) // keys.count
    out = k.new_empty(keys.count, tiles * size, *k.shape[1:])
    out[:, : keys.length] = k.unflatten(0, (keys.count, keys.length))
    out = out.unflatten(1, (tiles, size // 4, 4)).transpose(2, 3).contiguous()
    return out.flatten(0, 3), Axis(keys.count, tiles * size)


def launch_scores(
    q: Tensor,
    k_cmp: Tensor,
    lse2: Tensor,
    blocks: Tensor,
    sequences: Sequences,
    scale: float,
    tile: Tile,
) -> None:
    """blocks [tokens, HKV, n] int32; arguments and result as in `topk.select_blocks`."""
    from nsa.kernels.hopper.scores import scores_kernel

    tokens, config, kv_heads = sequences.queries, sequences.config, k_cmp.shape[1]
    tiles = tokens.tile_count(tile.rows)
    k_cmp, keys = in_columns(k_cmp, sequences.compressed, tile.keys)
    launch(
        scores_kernel, (min(tiles * kv_heads, processors(q.device)),),
        _tiles(q, tokens, tile.rows), _tiles(k_cmp, keys, tile.keys),
        _lines(lse2, tokens, tile.rows), blocks,
        (tokens.length, tiles, kv_heads, tiles * kv_heads, tokens.starts), scale * LOG2E,
        2**sequences.index_bits - 1, G=q.shape[1] // kv_heads, SPAN=compressed_span(config),
        CONFIG=config, SLOTS=max(8, next_power_of_two(config.select_count)),
        Q_STAGES=tile.stages, K_STAGES=2, num_warps=tile.warps,
    )  # fmt: skip


def launch_forward(
    operands: Sequence[Tensor],
    out: tuple[Tensor, Tensor | None, Tensor],
    mix: tuple,
    span: Span,
    tokens: Axis,
    keys: Axis,
    scale: float,
    tile: Tile,
) -> None:
    """o [tokens, HQ, DV], its unit and lse2 [HQ, tokens], `out`, of operands q, k, v.

    mix: gates, branch, base, its branch, its unit, and sink2, as in `span_fwd.span_forward`.
    """
    from nsa.kernels.hopper.forward import forward_kernel

    q, k, v = operands
    gates, branch, base, base_branch, base_unit, sink2 = mix
    total, heads, dim = q.shape
    tiles = tokens.tile_count(tile.rows)
    launch(
        forward_kernel, (min(tiles * heads, processors(q.device)),),
        _tiles(q, tokens, tile.rows // 2), _tiles(k, keys, tile.keys), _tiles(v, keys, tile.keys),
        *out, gates, base, base_unit, sink2,
        tuple(None if x is None else x.stride() for x in (out[0], gates, base)),
        (tokens.length, keys.length, tiles, tiles * heads, tokens.starts), total, scale * LOG2E,
        SIZES=Sizes(heads, heads // k.shape[1], dim, v.shape[2]), SPAN=felt(span, keys),
        BRANCH=branch, BASE_BRANCH=-1 if base_branch is None else base_branch, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip


def _by_tiles(plan: Plan, sequences: Sequences, k: Tensor) -> tuple[tuple[int], tuple, Group]:
    """(grid, place and union, compile-time tile) of kernels whose warpgroups walk large tiles."""
    union, tokens, kv_heads = plan.largest, sequences.queries, k.shape[1]
    tiles = tokens.tile_count(union.tokens_per_tile)
    place = tokens.length, tiles, kv_heads, tiles * kv_heads, tokens.starts
    group = Group(union.tokens_per_tile, plan.heads, union.blocks.shape[2])
    grid = (min(ceil_div(place[3], 2), processors(k.device)),)
    return grid, (place, tuple(union.tensors())), group


def launch_selected(
    operands: Sequence[Tensor],
    out: tuple[Tensor, Tensor | None, Tensor],
    mix: tuple,
    plan: Plan,
    sequences: Sequences,
    scale: float,
    tile: Tile,
) -> None:
    """o [tokens, HQ, D], its rest and lse2 [tokens, HQ], `out`, of q, k, v, by plan's large tiles.

    mix: as in `launch_forward`.
    """
    from nsa.kernels.hopper.selected import selected_kernel

    q, k, v = operands
    gates, branch, base, base_branch, base_unit, sink2 = mix
    grid, walked, group = _by_tiles(plan, sequences, k)
    tokens = sequences.tokens
    launch(
        selected_kernel, grid,
        q, _tiles(k, tokens, tile.keys), _tiles(v, tokens, tile.keys), *out, gates, base, base_unit,
        sink2, tuple(None if x is None else x.stride() for x in (q, out[0], gates, base)),
        *walked, q.shape[0], scale * LOG2E, ROWS=tile.rows, TILE=group,
        BRANCH=branch, BASE_BRANCH=-1 if base_branch is None else base_branch, STAGES=tile.stages,
        num_warps=tile.warps,
    )  # fmt: skip


def launch_selected_dq(
    operands: Sequence[Tensor],
    statistics: tuple[Tensor, Tensor | None, Sequence[Tensor], Sequence[int]],
    gated: tuple[Tensor | None, Tensor | None, int],
    out: tuple[Tensor, Tensor],
    plan: Plan,
    sequences: Sequences,
    scale: float,
    *,
    add: bool,
    tile: Tile,
) -> None:
    """dq [tokens, HQ, D] and delta [tokens, HQ], `out`, of operands q, k, v, do, o, rest.

    statistics: lse2, kept, and deltas of the other branches, OTHERS; gated: gates, dgates, branch.
    tile.stages: stages of keys; values have one less.
    """
    from nsa.kernels.hopper.selected_dq import selected_dq_kernel

    q, k, v, do, o, rest = operands
    lse2, kept, deltas, others = statistics
    gates, dgates, branch = gated
    grid, walked, group = _by_tiles(plan, sequences, k)
    tokens = sequences.tokens
    launch(
        selected_dq_kernel, grid,
        q, _tiles(k, tokens, tile.keys), _tiles(v, tokens, tile.keys), do, o, rest,
        lse2, kept, tuple(deltas), gates, dgates, *out,
        tuple(None if x is None else x.stride() for x in (q, do, o, gates, dgates, out[0])),
        *walked, (q.shape[0], scale, scale * LOG2E), ROWS=tile.rows, TILE=group,
        BRANCH=branch, OTHERS=tuple(others), ADD=add, K_STAGES=tile.stages,
        V_STAGES=tile.stages - 1, num_warps=tile.warps,
    )  # fmt: skip
