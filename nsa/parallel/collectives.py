"""Collectives with gradients: tokens for heads, and an all-gather in two halves for overlap.

All work for gloo and NCCL: tensors are contiguous, and a buffer is kept until its transfer has been
waited for, on the stream that reads it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from nsa.parallel.layout import Layout
from nsa.parallel.mesh import ContextParallel

# By its name of torch 2.13, where there is one, for the older name warns then.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def tokens_for_heads(
    xs: Sequence[Tensor], layout: Layout, context: ContextParallel
) -> tuple[Tensor, ...]:
    """All tokens of 1/P of the heads, [B, T, H / P, F] each, from this rank's rows of all heads,
    [B, TL, H, F] each, in one exchange. Dtypes may differ; integers have no gradient."""
    return _Exchange.apply(layout, context, True, *xs)


def heads_for_tokens(
    xs: Sequence[Tensor], layout: Layout, context: ContextParallel
) -> tuple[Tensor, ...]:
    """Inverse of `tokens_for_heads`: [B, T, H / P, F] each -> [B, TL, H, F] each."""
    return _Exchange.apply(layout, context, False, *xs)


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, layout: Layout, context: ContextParallel, to_heads: bool, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.given = layout, context, to_heads
        ctx.set_materialize_grads(False)
        found = _exchanged(xs, *ctx.given, "exchanging tokens for heads")
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        layout, context, to_heads = ctx.given
        there = [grad for grad in grads if grad is not None]
        doing = "exchanging the gradients of heads"
        found = iter(_exchanged(there, layout, context, not to_heads, doing))
        return None, None, None, *(None if grad is None else next(found) for grad in grads)


def _exchanged(
    xs: Sequence[Tensor], layout: Layout, context: ContextParallel, to_heads: bool, doing: str
) -> tuple[Tensor, ...]:
    """`tokens_for_heads` or its inverse, without gradient.

    Chunks of a sequence in its order are sent and received in their places; a rank's own rows are
    copied once, into or out of a tensor [2, P, B, chunk, H / P, F] with each rank's heads together.
    """
    ranks, rank, chunk = context.ranks, context.rank, layout.chunk
    chunks = [layout.chunks(other) for other in range(ranks)]
    transfers, found = [], []
    for x in xs:
        if to_heads:
            by_chunk = x.unflatten(2, (ranks, -1)).unflatten(1, (2, chunk))
            packed = by_chunk.permute(1, 3, 0, 2, 4, 5).contiguous()
            whole = x.new_empty(x.shape[0], layout.padded, *packed.shape[4:])
        else:
            whole = x.contiguous()
            packed = x.new_empty(2, ranks, x.shape[0], chunk, *x.shape[2:])
        for half in range(2):
            for row in range(x.shape[0]):
                of = [packed[half, other, row] for other in range(ranks)]
                to = [whole[row, rows[half]] for rows in chunks]
                transfers.append((of, to))
        found.append(whole if to_heads else packed)
    works = []
    for tag, (of, to) in enumerate(transfers):
        # A chunk of mine comes from, or goes to, all others as theirs of the same half does.
        source, target = (of[rank], to[rank]) if to_heads else (to[rank], of[rank])
        target.copy_(source)
        for other in (other for other in range(ranks) if other != rank):
            send, receive = (of[other], to[other]) if to_heads else (to[other], of[other])
            peer = dist.get_global_rank(context.group, other)
            given = {"peer": peer, "group": context.group, "tag": tag}
            works += [dist.P2POp(dist.isend, send, **given)]
            works += [dist.P2POp(dist.irecv, receive, **given)]
    with context.naming(doing):
        for work in dist.batch_isend_irecv(works):
            work.wait()
    if to_heads:
        return tuple(found)
    return tuple(
        x.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2) for x in found
    )  # [B, TL, H, F]


class Gathering:
    """Rows of all ranks, from those of this one: sent now, received by `wait`.

    xs are [B, TL, *] each, of one dtype, in chunks of `layout`, sent one behind the other so that
    each arrives contiguous. `wait` returns two lists: the first ends[0] rows of each x in the
    order of the sequence, and the first ends[1]. By default those up to the end of this rank's
    head chunk and up to that of its tail chunk, which is all that their queries see.

    The backward mirrors it: what `wait` did sends the gradients off, and the start receives them,
    so that other gradients are computed in between. Each rank's part is added in fp32 (fp64 for
    fp64) in the order of ranks, so the sum does not depend on timing.
    """

    def __init__(
        self,
        xs: Sequence[Tensor],
        layout: Layout,
        context: ContextParallel,
        ends: tuple[int, int] | None = None,
    ) -> None:
        self.context, self.layout = context, layout
        self.shapes, self.dtype = [x.shape for x in xs], xs[0].dtype
        self.ends = ends or tuple(rows.stop for rows in layout.chunks(context.rank))
        self._work = self._kept = self._received = None
        self._token = _Start.apply(self, *xs)

    def wait(self) -> tuple[list[Tensor], list[Tensor]]:
        """Receive; see the class."""
        # Kept no longer: it leads to the graph, whose nodes hold this object.
        token, self._token = self._token, None
        found = _Finish.apply(token, self)
        half = len(self.shapes)
        return list(found[:half]), list(found[half:])

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Views [..., *shape] of the numbers of each x, which flat has in its last dimension."""
        parts = flat.split([shape.numel() for shape in self.shapes], dim=-1)
        return [x.unflatten(-1, shape) for x, shape in zip(parts, self.shapes, strict=True)]

    def launch(self, out: Tensor, x: Tensor, call: Any, doing: str) -> None:
        """Start a transfer of x into out; both are kept until `settle`."""
        with self.context.naming(doing):
            # Flat, since gloo compares shapes.
            self._work = call(out.view(-1), x.view(-1), group=self.context.group, async_op=True)
        self._kept, self._received = x, out

    def settle(self, doing: str) -> Tensor:
        """Wait for the transfer, on a GPU without the host; returns what arrived."""
        with self.context.naming(doing):
            self._work.wait()
        arrived, self._work, self._kept, self._received = self._received, None, None, None
        return arrived


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, gathering: Gathering, *xs: Tensor) -> Tensor:
        ctx.gathering = gathering
        mine = torch.cat([x.flatten() for x in xs])
        out = mine.new_empty(gathering.context.ranks, *mine.shape)
        gathering.launch(out, mine, all_gather, "sending keys and values")
        return mine.new_empty(0)  # carries the gradient's path, and nothing else

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gathering = ctx.gathering
        parts = gathering.settle("receiving the gradients of keys and values")
        *first, last = parts
        total = first[0]
        for part in first[1:]:
            total += part
        total = torch.add(total, last, out=total.new_empty(total.shape, dtype=gathering.dtype))
        return None, *gathering.pieces(total)


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, gathering: Gathering) -> tuple[Tensor, ...]:
        ctx.gathering = gathering
        shards = gathering.settle("receiving keys and values")
        whole = [gathering.layout.natural(piece) for piece in gathering.pieces(shards)]
        # Two tensors of each, so that autograd does not add the gradients in the narrow dtype.
        head, tail = gathering.ends
        return *(x[:, :head] for x in whole), *(x[:, :tail] for x in whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gathering, layout = ctx.gathering, ctx.gathering.layout
        wide = torch.promote_types(gathering.dtype, torch.float32)
        half, count = len(gathering.shapes), sum(shape.numel() for shape in gathering.shapes)
        parts = grads[0].new_empty(layout.ranks, count, dtype=wide)
        # Each rank's rows are added where they are sent from: a pass over all keys costs bandwidth.
        each = zip(gathering.pieces(parts), grads[half:], grads[:half], strict=True)
        for part, of_tail, of_head in each:
            layout.add_by_rank(part, of_tail, of_head)
        doing = "sending the gradients of keys and values"
        gathering.launch(torch.empty_like(parts), parts, dist.all_to_all_single, doing)
        return grads[0].new_zeros(0), None


@torch.no_grad()
def gather_sequence(
    x: Tensor, context: ContextParallel, tokens: int | None = None, dim: int = 1
) -> Tensor:
    """All tokens of x along `dim` in their order on every rank, without gradient; at most the first
    `tokens`, which drops padding."""
    layout = context.layout(x.shape[dim])
    shards = [x]
    if context.ranks > 1:
        shards = x.new_empty(context.ranks, *x.shape)
        with context.naming("gathering a sequence"):
            mine = x.contiguous().view(-1)
            all_gather(shards.view(-1), mine, group=context.group)
    whole = layout.natural(shards, dim)
    return whole if tokens is None else whole.narrow(dim, 0, tokens)
