"""Matrix products and softmax statistics that the blockwise backends share. No autograd here."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor


def plain_backward(backward: Callable) -> Callable:
    """A Function's backward that keeps its own dtypes under autocast and refuses create_graph.

    What it saved beside its inputs has no graph: a second derivative would be wrong in silence.
    """

    @wraps(backward)
    def run(ctx, do):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this backend has no second derivative (create_graph=True); "
                "backend='masked' and 'sequential' have one"
            )
        with torch.autocast(do.device.type, enabled=False):
            return backward(ctx, do)

    return run


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, statistics and accumulators: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(dtype, torch.float32)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """[N, M, K] @ [N, K, P] with the sums and the result in the wide dtype."""
    if a.dtype == wide(a.dtype):
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """[B, M, HQ, D] -> [B*HKV, G*M, D]: the rows of a group one below the other, head by head."""
    batch, rows, heads, dim = x.shape
    grouped = x.reshape(batch, rows, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    return grouped.reshape(batch * kv_heads, -1, dim)


def by_query(x: Tensor, batch: int, kv_heads: int, rows: int) -> Tensor:
    """The way back from `by_kv_head`: [B*HKV, G*M, D] -> [B, M, HQ, D]."""
    grouped = x.view(batch, kv_heads, -1, rows, x.shape[-1]).permute(0, 3, 1, 2, 4)
    return grouped.reshape(batch, rows, -1, x.shape[-1])


def probs_from(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse) with lse [..., M] for scores [..., M, S]; 0 where a row has no key."""
    shift = torch.where(lse.isneginf(), 0.0, lse)  # exp(-inf - -inf) would be NaN
    return torch.exp(scores - shift[..., None])
