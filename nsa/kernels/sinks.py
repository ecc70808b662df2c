"""Attention sinks in the backward: one more logit per softmax; for a forward see `common.sunk`.

A sink has no key or value. The kernels' formulas hold unchanged if the log-sum-exp includes its
term: the probabilities of keys then add up to less than 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.kernels.common import LOG2E


class Sunk(NamedTuple):
    """Statistics of a branch with its sinks, all [HQ, tokens], or [tokens, HQ] as its lse2."""

    lse2: Tensor  # with the sink's term; -inf if a row sees no key, then the rest is undefined
    kept: Tensor | None = None  # sum of the keys' probabilities; None: 1, without a sink
    lost: Tensor | None = None  # [HQ, tokens] in any case: the sink's probability


def sunk_rows(sinks: Tensor | None, cmp: Tensor, slc: Tensor, win: Tensor) -> tuple[Sunk, ...]:
    """Statistics in the order of gates from each branch's lse2 over keys; empty ones stay empty."""
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
    """[HQ, 3] fp32 from each branch's (delta [HQ, tokens], number), summed in a fixed order.

    A sink's value is 0, so its logit has the gradient -gate lost delta.
    """
    grads = torch.zeros_like(sinks)
    for delta, branch in deltas:
        each = delta * rows[branch].lost
        grads[:, branch] = -(each if gates is None else each * gates[..., branch].t()).sum(-1)
    return grads
