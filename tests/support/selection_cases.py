"""The exact facts of a selection (Eq. 8-11), and how well one keeps what is important."""

import torch

from nsa.reference.attend import attention_probs
from nsa.reference.nsa import compressed_visible
from nsa.reference.select import importance, select


def scores(q, k_cmp, config, scale=0.25):
    """Exact importance [T, HKV, NB] of one sequence."""
    positions = torch.arange(len(q), device=q.device)
    visible = compressed_visible(positions, len(k_cmp), config)
    probs, _ = attention_probs(q[None].double(), k_cmp[None].double(), visible, scale)
    return importance(probs, config)[0]


def assert_selects_as_well(got, exact, config, dtype):
    best = select(exact[None], config)[0]
    assert torch.equal(got < 0, best < 0), "a legal block is missing, or a slot is not at the end"
    order = torch.where(got < 0, exact.shape[-1], got)
    assert (order.diff(dim=-1) > 0)[got[..., 1:] >= 0].all(), "not ascending"
    own = torch.arange(len(got), device=got.device)[:, None] // config.select_block
    assert (got <= own[..., None]).all(), "a block begins after its query"
    for forced in [*range(config.select_initial), *(own - i for i in range(config.select_local))]:
        forced = torch.as_tensor(forced, device=got.device).expand(own.shape)[..., None]
        there = (got == forced).any(-1, keepdim=True)
        assert (there | (forced < 0) | (forced > own[..., None])).all(), "a forced block is missing"

    def kept(blocks):
        weight = exact.gather(-1, blocks.long().clamp(min=0)).masked_fill(blocks < 0, 0.0)
        return weight.sum(-1)

    if exact.numel():
        loss = kept(best) - kept(got)
        assert loss.abs().max() <= 3 * torch.finfo(dtype).eps * exact.sum(-1).max()
