"""phi without an unfolded copy of the keys: one matmul a stride instead of one a block (Eq. 7)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.attention.products import wide
from nsa.blocks import count_compressed
from nsa.config import NSAConfig
from nsa.reference.compress import PhiWeights


def compress(x: Tensor, kind: str, weights: PhiWeights, config: NSAConfig) -> Tensor:
    """Compressed keys or values [B, C, HKV, D] of x [B, T, HKV, D] for phi "linear" or "mlp".

    A block is l/d strides of d tokens. Every stride is multiplied once with each of the l/d slabs
    of the weights, and a block adds up the products of its strides; the position encoding is a
    constant that is multiplied on its own. Needs l/d products of [B, T/d, HKV, HIDDEN] instead of
    l/d copies of x.
    """
    count = count_compressed(x.shape[1], config)
    if count == 0:
        return x[:, :0]
    stride, parts = config.compress_stride, config.compress_block // config.compress_stride
    batch, _, heads, dim = x.shape
    strides = count + parts - 1
    rows = x[:, : strides * stride].reshape(batch, strides, stride, heads, dim)
    rows = rows.permute(3, 0, 1, 2, 4).reshape(heads, batch * strides, stride * dim)
    slabs = weights.weight1.unflatten(1, (parts, stride * dim))  # [HKV, l/d, d*D, HIDDEN]
    hidden = weights.position.flatten(1)[:, None] @ weights.weight1  # [HKV, 1, HIDDEN]
    if kind == "mlp":
        hidden = hidden + weights.bias1[:, None]
    hidden = hidden[:, None].to(wide(x.dtype))  # many strides are added up before one rounding
    for part in range(parts):
        product = torch.bmm(rows, slabs[:, part]).unflatten(1, (batch, strides))
        hidden = hidden + product[:, :, part : part + count]
    hidden = hidden.to(x.dtype)
    if kind == "mlp":
        hidden = F.gelu(hidden) @ weights.weight2[:, None] + weights.bias2[:, None, None]
    return hidden.permute(1, 2, 0, 3)
