"""Compressed keys and values of a sequence on several ranks: each is made by one rank, and sent.

A compressed block belongs to the chunk of its first token. It may reach l - d tokens into the next
chunk, which the ranks exchange first.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nsa.attention.branches import compressed
from nsa.attention.inputs import Inputs
from nsa.attention.registry import Compress, taken
from nsa.attention.transforms import without_autocast
from nsa.blocks import count_compressed
from nsa.parallel.collectives import Gathering
from nsa.parallel.layout import Layout
from nsa.parallel.mesh import ContextParallel
from nsa.reference.compress import Phi


def can_pool(inputs: Inputs, layout: Layout, bounds: Sequence[int]) -> bool:
    """True if blocks start in each chunk as in the first, and reach no further than the next.

    Blocks of packed sequences start anywhere; those are made on each rank, of gathered keys. So are
    those of the compressed branch alone.
    """
    reach = inputs.config.compress_block - inputs.config.compress_stride
    fits = layout.chunk % inputs.config.compress_stride == 0 and layout.chunk >= reach
    return fits and len(bounds) == 2 and "cmp" in inputs.k and len(inputs.k) > 1


def compress_of(backend: str, inputs: Inputs) -> Compress:
    """The compression of the backend that takes this rank's rows: "auto" or one by name."""
    return taken(backend, inputs).compress or compressed


def pooled(
    inputs: Inputs, layout: Layout, context: ContextParallel, compress: Compress
) -> Gathering:
    """Make this rank's compressed keys, and values if their branch is computed, and send them.

    What is received are those of the tokens up to the end of each chunk.
    """
    config, chunks = inputs.config, layout.chunks(context.rank)
    xs = [side["cmp"] for side in (inputs.k, inputs.v) if "cmp" in side]
    longer = _with_next(xs, inputs, layout, context)
    made = []
    with without_autocast(inputs.q.device):
        for rows, k, *v in zip(chunks, *longer, strict=True):
            values = {**inputs.v, "cmp": v[0]} if v else inputs.v
            phi = _from(inputs.phi, rows.start)
            made.append(compress(replace(inputs, k={"cmp": k}, v=values, phi=phi)))
    blocks = Layout(layout.padded, layout.ranks, layout.chunk // config.compress_stride)
    ends = tuple(count_compressed(rows.stop, config) for rows in chunks)
    sides = [torch.cat(pair, dim=1) for pair in zip(*made, strict=True) if pair[0] is not None]
    return Gathering(sides, blocks, context, ends)


def _with_next(
    xs: list[Tensor], inputs: Inputs, layout: Layout, context: ContextParallel
) -> list[list[Tensor]]:
    """[B, chunk + l - d, HKV, *] for both chunks of each x: its rows, and the first of the next
    chunk, which are zeros after the last; no block that is used reaches those."""
    reach = inputs.config.compress_block - inputs.config.compress_stride
    halves = [x.split(layout.chunk, dim=1) for x in xs]
    if reach == 0:
        return [list(pair) for pair in halves]
    firsts = Layout(layout.padded, layout.ranks, reach)
    ends = tuple(min(rows.stop + reach, firsts.padded) for rows in firsts.chunks(context.rank))
    begin = [torch.cat([half[:, :reach] for half in pair], dim=1) for pair in halves]
    received = Gathering(begin, firsts, context, ends).wait()
    found: list[list[Tensor]] = [[] for _ in xs]
    for number, rows in enumerate(firsts.chunks(context.rank)):
        for pair, first, longer in zip(halves, received[number], found, strict=True):
            after = first[:, rows.stop :]
            if rows.stop == firsts.padded:
                after = torch.zeros_like(pair[number][:, :reach])
            longer.append(torch.cat([pair[number], after], dim=1))
    return found


def _from(phi: Phi, start: int) -> Phi:
    """Phi whose tables begin at a chunk, where its blocks count from 0."""
    if phi.rotary is None:
        return phi
    return replace(phi, rotary=tuple(table[start:] for table in phi.rotary))
