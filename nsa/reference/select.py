"""Selection of blocks by a query: importance from the compressed probabilities, then top n."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nsa.blocks import count_selectable, overlap
from nsa.config import NSAConfig


def importance(
    p_cmp: Float[Tensor, "B HKV G T C"], config: NSAConfig, tokens: int | None = None
) -> Float[Tensor, "B T HKV NB"]:
    """Eq. 9 and 10: p_slc[j] = sum_i M[i, j] p_cmp[i], summed over the heads of the group.

    M counts the shared strides, as the paper's sum does. The other convention, which the case study
    has, is the fraction of compressed block i that lies in block j: M d / l, which ranks alike.
    `tokens` of the sequence are as many as queries by default.
    """
    blocks = count_selectable(p_cmp.shape[3] if tokens is None else tokens, config)
    shared = [[overlap(i, j, config) for j in range(blocks)] for i in range(p_cmp.shape[4])]
    matrix = torch.tensor(shared, dtype=p_cmp.dtype, device=p_cmp.device).view(-1, blocks)
    return torch.einsum("bhgtc,cj->bthj", p_cmp, matrix)


def select(
    scores: Float[Tensor, "B T HKV NB"],
    config: NSAConfig,
    first_position: int | Int[Tensor, "B 1"] = 0,
) -> Int[Tensor, "B T HKV N"]:
    """Eq. 11: the forced blocks, then the most important legal ones, N = select_count in all.

    Row t is the query at position first_position + t, which may differ by sequence. Ties go to the
    lower index. Returns int32 indices in ascending order, -1 in the slots for which there is no
    legal block.
    """
    tokens, blocks = scores.shape[1], scores.shape[3]
    position = first_position + torch.arange(tokens, device=scores.device)
    own = (position // config.select_block)[..., None, None]
    j = torch.arange(blocks, device=scores.device)
    legal = j <= own  # [T, 1, NB] or [B, T, 1, NB]: the block starts at or before the query
    # NaN would rank above the forced blocks.
    scores = torch.where(scores.isnan(), -1.0, scores)
    forced = (j < config.select_initial) | (j > own - config.select_local)
    ranked = scores.masked_fill(forced, float("inf")).masked_fill(~legal, float("-inf"))
    best = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : config.select_count]
    none = blocks  # sorts behind every real index
    best = torch.where(best <= own, best, none).sort(dim=-1).values
    best = torch.where(best == none, -1, best).to(torch.int32)
    padding = config.select_count - best.shape[-1]
    return torch.nn.functional.pad(best, (0, max(padding, 0)), value=-1)


def selected_tokens(
    blocks: Int[Tensor, "B T HKV N"], keys: int, config: NSAConfig
) -> Bool[Tensor, "B HKV T S"]:
    """Mask of the `keys` tokens in a query's blocks, without the causal mask.

    An index outside 0..NB-1 is an empty slot.
    """
    count = count_selectable(keys, config)
    table = torch.zeros(*blocks.shape[:3], count + 1, dtype=torch.bool, device=blocks.device)
    slots = torch.where((blocks < 0) | (blocks > count), count, blocks).long()
    table = table.scatter(-1, slots, True)[..., :count]
    return table.repeat_interleave(config.select_block, dim=-1)[..., :keys].transpose(1, 2)
