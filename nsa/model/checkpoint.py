"""Gradient checkpointing for a range of layers: less memory for one more forward of each.

The path witness counts calls, so a recomputed layer's attention counts twice a step: it did run
twice.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa.model.config import layer_range


def apply(model: nn.Module, layers: str) -> range:
    """Recompute these layers of `model.blocks` in the backward; returns which.

    `layers` is "" (none), "all" or "start:end", as `layer_range` reads it. Parameters keep their
    names, and a later call replaces an earlier one.
    """
    recomputed = layer_range(layers, len(model.blocks))
    model.run_blocks = partial(run_blocks, recomputed=recomputed)
    return recomputed


def run_blocks(blocks: Iterable[nn.Module], x: Tensor, *context: Any, recomputed: range) -> Tensor:
    """x through the blocks in turn, each called as block(x, *context).

    Each checkpoint is given the block itself. A lambda over the loop's variable would give the same
    loss and recompute every layer with the last block, since the backward runs after the loop.

    The whole block is recomputed (early_stop=False), which costs no more than its last operation:
    so a recomputation that saves other tensors than the forward did is noticed by torch. No layer
    draws random numbers, so their state is not stored.
    """
    for index, block in enumerate(blocks):
        if index in recomputed:
            x = checkpoint(
                block,
                x,
                *context,
                use_reentrant=False,
                preserve_rng_state=False,
                early_stop=False,
            )
        else:
            x = block(x, *context)
    return x
