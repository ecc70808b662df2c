"""Comparison of the warp-specialized kernels with Triton's on this GPU."""

from functools import cache, partial

import torch
from torch import Tensor

from nsa.blocks import compressed_span, window_span
from nsa.config import NSAConfig
from nsa.kernels.hopper import launches
from nsa.kernels.selected_dq import selected_dq
from nsa.kernels.selected_fwd import selected_forward
from nsa.kernels.selected_plan import plan
from nsa.kernels.sequences import Sequences, dense
from nsa.kernels.span_bwd import span_dkdv, span_dq
from nsa.kernels.span_fwd import span_forward
from nsa.kernels.tiles import Tile, name_of
from nsa.kernels.topk import select_blocks

# GPU models on which the tests of all these kernels ran.
PROVEN = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
HEADS, KV_HEADS = 8, 2
CLOSE = 0.02  # of the largest number: roundings of 16 bits in another order


def check(q: Tensor) -> None:
    """Check before strict mode's first call with q [..., D] on a GPU that is not in PROVEN.

    Raises:
        RuntimeError: if a kernel that `auto` may choose differs from Triton's.
    """
    if q.is_cuda and name_of(q.device) not in PROVEN:
        compare(q.device, q.dtype, q.shape[-1])


@cache
def compare(device: torch.device, dtype: torch.dtype, width: int, tokens: int = 2048) -> None:
    """Compare each kernel of FASTER for D = DV = width, with each of its tiles, on random data."""
    config = NSAConfig()
    sequences, generator = dense(1, tokens, config), torch.Generator(device).manual_seed(0)

    def draw(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, width, device=device, dtype=dtype, generator=generator)

    for (kernel, of_width, looks_back), tiles in launches.FASTER.items():
        if of_width != width:
            continue
        span = window_span(config) if looks_back else compressed_span(config)
        chooses = kernel.startswith("selected")
        all_keys = looks_back or chooses
        keys = sequences.tokens if all_keys else sequences.compressed
        q, do = draw(tokens, HEADS), draw(tokens, HEADS)
        k, v = draw(keys.rows, KV_HEADS), draw(keys.rows, KV_HEADS)
        if launches.why_not(kernel, sequences.tokens, keys, (q, k, v, do)):
            continue
        along = span, sequences.tokens, keys, width**-0.5
        o, lse2 = span_forward(q, k, v, *along, specialized=False)
        delta = (o.float() * do.float()).sum(2).t().contiguous()
        saved = q, k, v, do, lse2
        call = {
            "forward": partial(span_forward, q, k, v, *along),
            "dq": partial(span_dq, *saved, None, 2, *along, delta=None if looks_back else delta),
            "dkdv": partial(span_dkdv, *saved, delta, None, 2, *along),
            "scores": partial(_scored, q),
            "selected": partial(_selected, q, k, v, None, sequences),
            "selected_dq": partial(_selected, q, k, v, do, sequences),
        }[kernel]
        want = call(specialized=False)
        for _, tile in tiles:
            for x, y in zip(want, call(specialized=True, tile=tile), strict=True):
                if kernel == "scores":
                    error, largest = (x != y).float().mean(), 1.0
                else:
                    error = torch.where(x == y, 0.0, (x.float() - y.float()).abs()).max()
                    largest = x[x.isfinite()].abs().max()
                if not error <= CLOSE * largest:
                    raise RuntimeError(
                        f"{kernel} of {'blocks' if chooses else span} by "
                        f"specialized warps, {tile}, differs by "
                        f"{float(error):.2e} of at most {float(largest):.2e} from Triton's on "
                        f"{device}; please report it. Without strict=True nothing looks"
                    )


def _scored(q: Tensor, *, tile: Tile | None = None, **asked: bool) -> tuple[Tensor]:
    """Blocks that q selects, from the same keys each time; the blocks are short, hence many.

    If two have the same importance, kernels may select different ones.
    """
    sequences = dense(1, len(q), NSAConfig(8, 4, 16, 4))
    keys, scale = sequences.compressed, q.shape[2] ** -0.5
    k_cmp = q.roll(1, 0)[: keys.rows, :KV_HEADS].contiguous()
    along = compressed_span(sequences.config), sequences.tokens, keys, scale
    _, lse2 = span_forward(q, k_cmp, k_cmp, *along, specialized=False)
    return (select_blocks(q, k_cmp, lse2, sequences, scale, tile=tile, **asked),)


def _selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None,
    sequences: Sequences,
    *,
    tile: Tile | None = None,
    **asked: bool,
) -> tuple[Tensor, Tensor]:
    """(o, lse2) of the selected branch, or (dq, delta) if do is given, for a fixed selection."""
    config, generator = sequences.config, torch.Generator(q.device).manual_seed(1)
    shape = len(q), k.shape[1], config.select_count
    visible = torch.arange(len(q), device=q.device)[:, None, None] // config.select_block + 1
    blocks = (torch.rand(shape, device=q.device, generator=generator) * visible).int()
    planned = plan(blocks, sequences, q.shape[1] // k.shape[1])
    tiles = None if tile is None else {"large": tile}
    along = planned, sequences, q.shape[2] ** -0.5
    if do is None:
        return selected_forward(q, k, v, *along, tile=tiles, **asked)
    o, lse2 = selected_forward(q, k, v, *along, specialized=False)
    return selected_dq(q, k, v, do, lse2, None, 1, *along, o=o, tile=tiles, **asked)
