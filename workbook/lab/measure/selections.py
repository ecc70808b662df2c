"""Statistics of the blocks that a model's queries select, layer by layer."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from nsa.attention.api import with_blocks
from nsa.attention.registry import choose
from nsa.config import NSAConfig
from nsa.model.layer import NSAAttention
from nsa.model.train_config import autocast
from workbook.lab.observers.attention_stats import distances, gate_statistics, layer_inputs

UNITED = 8  # consecutive queries whose blocks our kernels unite
NEIGHBOURS = (4, UNITED, 64)  # numbers of them whose unions are counted
Blocks = Int[Tensor, "B T HKV N"]  # -1 where a slot is empty


@torch.no_grad()
def selections(
    model: nn.Module,
    tokens: Int[Tensor, "B T"],
    precision: str = "fp32",
    keep: Callable[[int, dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Compute the statistics of each layer that selects: gates (means of the three shares and their
    entropy in nats), and `described`.

    keep: called with each of these layers' number and its tensors: q [B, T, HQ, D], k and v by
    branch [B, T, HKV, D], gates [B, T, HQ, 3] and blocks [B, T, HKV, n].

    Cost: a forward and, for each layer, its selection twice more. Raises ValueError for a model
    without such a layer.
    """
    layers = [m for m in model.modules() if isinstance(m, NSAAttention)]
    layers = [m for m in layers if m.config.force_branch in (None, "slc")]
    if not layers:
        raise ValueError("no layer of the model selects blocks; attention='nsa' does")
    found: list[dict[str, Any]] = []

    def look(layer: NSAAttention, args: tuple, kwargs: dict) -> None:
        if kwargs.get("blocks") is not None:  # the selection of an earlier layer
            return
        inputs = layer_inputs(layer, *args[:2])
        config, gates = inputs.config, gate_statistics(inputs.gates)
        alone = replace(inputs, config=replace(config, select_initial=0, select_local=1))
        with torch.autocast(tokens.device.type, enabled=False):
            blocks, free = (with_blocks(x, choose(x).backend).blocks for x in (inputs, alone))
        if keep is not None:
            tensors = {"q": inputs.q, "k": dict(inputs.k), "v": dict(inputs.v)}
            keep(len(found), tensors | {"gates": inputs.gates, "blocks": blocks})
        row = {"gates": [float(x) for x in gates[:3]], "entropy": float(gates[3])}
        found.append(row | described(blocks, free, config))

    forward_seen(model, tokens, precision, layers, look)
    return found


def forward_seen(
    model: nn.Module,
    tokens: Int[Tensor, "B T"],
    precision: str,
    layers: Sequence[nn.Module],
    look: Callable[[Any, tuple, dict[str, Any]], None],
) -> None:
    """Run the model's forward; `look(layer, args, kwargs)` is called before each of the layers."""
    with ExitStack() as hooks, autocast(precision, tokens.device):
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(look, with_kwargs=True))
        model(tokens)


def described(blocks: Blocks, free: Blocks, config: NSAConfig) -> dict[str, Any]:
    """Describe a selection, and how much of it would have been chosen without being forced.

    `free` is the selection with the query's own block alone forced. Returned are "union", for each
    number of neighbours {distinct blocks: tiles}, and "union_mean", their means; "far", {distance:
    slots}, the blocks from a query's own back to one that was not forced, rounded up to a power of
    two; "forced", a share of slots; "first_anyway" and "local_anyway", the shares of queries whose
    scores alone would have chosen the first block, and the one before their own.
    """
    tokens = torch.arange(blocks.shape[1], device=blocks.device)
    own = (tokens // config.select_block)[:, None, None]
    chosen = (blocks >= config.select_initial) & (blocks <= own - config.select_local)
    back = (own - blocks)[chosen].float().clamp(min=1).log2().ceil()
    far = torch.bincount(back.long(), minlength=1)
    # Queries for which the choice is real: more blocks than slots.
    asked = (own >= config.select_count).expand(*free.shape[:3], 1).squeeze(-1)

    def anyway(block: Tensor) -> float:
        return float(((free == block).any(-1) & asked).sum() / asked.sum().clamp(min=1))

    unions = {n: union_histogram(blocks, n) for n in NEIGHBOURS if blocks.shape[1] >= n}
    return {
        "union": {str(n): counts for n, counts in unions.items()},
        "union_mean": {
            str(n): sum(int(d) * tiles for d, tiles in counts.items()) / sum(counts.values())
            for n, counts in unions.items()
        },
        "far": {str(2**i): n for i, n in enumerate(far.tolist()) if n},
        "forced": float(distances(blocks, config)[2]),
        "first_anyway": anyway(torch.zeros_like(own)),
        "local_anyway": anyway(own - 1),
    }


def union_histogram(blocks: Blocks, neighbours: int) -> dict[str, int]:
    """Count tiles of `neighbours` consecutive queries by the number of distinct blocks that they
    select together, over the batch and KV heads: {number: tiles}."""
    tiles = blocks.shape[1] // neighbours * neighbours
    tile = blocks[:, :tiles].unflatten(1, (-1, neighbours)).transpose(2, 3).flatten(3)
    tile = tile.sort(dim=-1).values
    distinct = (tile.diff(dim=-1) > 0).sum(-1) + (tile[..., 0] >= 0)
    counts = torch.bincount(distinct.flatten())
    return {str(n): count for n, count in enumerate(counts.tolist()) if count}
