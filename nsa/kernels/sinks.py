"""One more logit a softmax, without a key or a value, at a backward; a forward's is `common.sunk`.

The kernels' own formulas hold with it, as soon as the log-sum-exp that they are given has its term:
probabilities of keys then add up to less than 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.kernels.common import LOG2E


class Sunk(NamedTuple):
    """The rows of a branch under its sinks, all [HQ, tokens], or [tokens, HQ] as its lse2 is."""

    lse2: Tensor  # with the sink's term; -inf of a row that sees no key, whose rest means nothing
    kept: Tensor | None = None  # what probabilities of keys add up to; None: 1, of no sink
    lost: Tensor | None = None  # [HQ, tokens] in any case: the sink's probability


def sunk_rows(sinks: Tensor | None, cmp: Tensor, slc: Tensor, win: Tensor) -> tuple[Sunk, ...]:
    """In the order of gates, from each branch's lse2 over the keys alone; empty ones stay so."""
    if sinks is None:
        return Sunk(cmp), Sunk(slc), Sunk(win)
    of_cmp, of_slc, of_win = sinks.unbind(-1)
    slc = _sunk(slc, of_slc)
    if slc.lost is not None:
        slc = slc._replace(lost=slc.lost.t())
    return _sunk(cmp, of_cmp[:, None]), slc, _sunk(win, of_win[:, None])


def _sunk(lse2: Tensor, sink: Tensor) -> Sunk:
    if not lse2.numel():
        return Sunk(lse2)
    empty = lse2.isneginf()
    ahead = lse2.masked_fill(empty, 0.0) / LOG2E - sink
    total = torch.logaddexp2(lse2, sink * LOG2E).masked_fill_(empty, float("-inf"))
    return Sunk(total, ahead.sigmoid(), (-ahead).sigmoid())


def sink_gradients(
    sinks: Tensor,
    gates: Tensor | None,
    rows: Sequence[Sunk],
    deltas: Sequence[tuple[Tensor, int]],
) -> Tensor:
    """[HQ, 3] fp32 from each branch's (delta [HQ, tokens], number), summed in one order.

    A sink's value is 0, so that its logit has the gradient -gate lost delta.
    """
    grads = torch.zeros_like(sinks)
    for delta, branch in deltas:
        each = delta * rows[branch].lost
        grads[:, branch] = -(each if gates is None else each * gates[..., branch].t()).sum(-1)
    return grads
