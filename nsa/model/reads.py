"""Number of keys that a token reads in each branch, as a function of its position."""

import torch
from jaxtyping import Int64
from torch import Tensor

from nsa.config import NSAConfig
from nsa.reference.nsa import BRANCHES


def keys_read(lengths: Int64[Tensor, " B"], config: NSAConfig) -> Int64[Tensor, "B 3"]:
    """Number of keys that a sequence's first `lengths[b]` tokens read, by branch: cmp, slc, win.

    The token at position t reads max(0, (t + 1 - l) // d + 1) compressed keys. Of the selected
    blocks, min(n, t // l' + 1), its own is one and the others are full: that makes (blocks - 1) l'
    + t % l' + 1 tokens, whichever were selected. In the window it reads min(w, t + 1). These are
    the sums over t, for one KV head of one layer; a step's are the difference of two. Nothing
    waits for the device.
    """
    zero = torch.zeros_like(lengths)
    # The j-th token from the end of the first compressed block on reads j // d + 1 keys.
    readers = torch.maximum(lengths - config.compress_block + 1, zero)
    steps, rest = readers // config.compress_stride, readers % config.compress_stride
    cmp = readers + steps * (steps - 1) // 2 * config.compress_stride + steps * rest
    size, most = config.select_block, config.select_count
    full, rest = lengths // size, lengths % size
    few = full.clamp(max=most)
    others = few * (few - 1) // 2 + (full - few) * (most - 1)  # blocks beside its own, per token
    slc = others * size * size + full * (size * (size + 1) // 2)
    slc = slc + rest * ((full + 1).clamp(max=most) - 1) * size + rest * (rest + 1) // 2
    near = lengths.clamp(max=config.window)
    win = near * (near + 1) // 2 + (lengths - near) * config.window
    return torch.stack([cmp, slc, win], dim=-1)


def by_branch(
    counts: Int64[Tensor, " 3"], branches: tuple[str, ...], layers: int = 1
) -> dict[str, int]:
    """Counts of the computed branches; "slc" alone reads compressed keys too, for scoring."""
    read = {*branches, "cmp"} if "slc" in branches else set(branches)
    found = zip(BRANCHES, counts.tolist(), strict=True)
    return {name: count * layers for name, count in found if name in read}
