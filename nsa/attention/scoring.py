"""Selection without a T x C or T x NB tensor: scores, Eq. 9-11, a chunk of queries at a time."""

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.attention.products import probs_from
from nsa.attention.span import span_chunks, span_scores
from nsa.blocks import compressed_span, count_selectable, overlap_band
from nsa.config import NSAConfig
from nsa.reference.select import select


@torch.no_grad()
def select_blocks(q: Tensor, k_cmp: Tensor, config: NSAConfig, scale: float) -> Tensor:
    """The blocks that each query selects: [B, T, HKV, N] int32, ascending, -1 where empty.

    q is [B, T, HQ, D] and k_cmp [B, C, HKV, D]. No gradient flows through the selection.
    """
    span = compressed_span(config)
    chunks = []
    for rows, keys in span_chunks(q, span):
        # [B*HKV, G, M, S], then [B*HKV, M, S]
        scores = span_scores(q[:, rows], k_cmp[:, keys], span, scale, rows.start)
        p_cmp = probs_from(scores, torch.logsumexp(scores, dim=-1)).sum(1)
        importance = pool(p_cmp, count_selectable(rows.stop, config), config)
        importance = importance.unflatten(0, (q.shape[0], -1)).transpose(1, 2)
        chunks.append(select(importance, config, first_position=rows.start))
    return torch.cat(chunks, dim=1)


def pool(p_cmp: Tensor, blocks: int, config: NSAConfig) -> Tensor:
    """Eq. 9 for p_cmp [..., C], summed over a group or not: importance [..., blocks]."""
    offset, weights = overlap_band(config)
    step = config.select_block // config.compress_stride
    right = blocks * step + len(weights) - p_cmp.shape[-1] + offset
    padded = F.pad(p_cmp, (-offset, max(right, 0)))
    bands = [padded[..., m : m + blocks * step : step] * w for m, w in enumerate(weights)]
    return torch.stack(bands).sum(0)
