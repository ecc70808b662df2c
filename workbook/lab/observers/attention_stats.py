"""Attention statistics during training: gates, selection distances, branch outputs."""

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nsa.attention import registry
from nsa.attention.api import branches_of, with_blocks
from nsa.attention.inputs import Inputs, checked
from nsa.attention.span import wide
from nsa.config import NSAConfig
from nsa.model.layer import NSAAttention
from nsa.reference.nsa import BRANCHES
from workbook.lab.observers.deferred import Deferred
from workbook.lab.observers.module_order import refuse_without_hooks

NAMES = (
    *(f"gate_{branch}" for branch in BRANCHES),
    *("gate_entropy", "gate_max", "collapse_share"),
    *("distance_blocks", "distance_free_blocks", "forced_share"),
    *("k_mean", "k_max", "share_at_max"),
    *(f"norm_{branch}" for branch in BRANCHES),
)
COLLAPSED = 0.95  # share of the gates' sum in one gate, so that the others hardly matter


class AttentionStats:
    """Observer that computes statistics of every NSAAttention of the model each `every` steps.

    For each layer, over the batch, its tokens and heads: means of gate_cmp, gate_slc, gate_win and
    of gate_entropy, in nats, of the gates divided by their sum; gate_max, the largest gate;
    collapse_share, the share of triples in which one gate has more than 0.95 of the sum. Means of
    distance_blocks, the number of blocks from a query's own back to the selected ones;
    distance_free_blocks, the same for blocks that were chosen rather than forced; forced_share of
    the selected blocks. k_mean and k_max, selected keys that a query attends to, excluding future
    ones, and share_at_max, the share of queries that have k_max. Means of norm_cmp, norm_slc,
    norm_win, Euclidean norms of a head's output before its gate. Statistics without data (blocks
    not forced in a short sequence, branches that are not computed) are NaN.

    Nothing waits for the device: numbers are read when they have arrived, and then passed to the
    `writers` (write(step, {"layer0/gate_cmp": ...})).

    Cost: none in other steps; an observed one computes all attention once more, without gradient:
    0.26 to 0.46 of a step of the presets on a CPU, so less than 1 % at every=50.

    Raises ValueError for a model without such a layer.
    """

    def __init__(
        self, model: nn.Module, every: int = 50, writers: Sequence[Any] = (), keep: int = 1000
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1; 50 is usual")
        self._layers = [m for m in model.modules() if isinstance(m, NSAAttention)]
        if not self._layers:
            raise ValueError("the model has no NSAAttention to look into")
        self.every, self.writers = every, tuple(writers)
        self._hooks = ExitStack()
        self._found: dict[int, Tensor] = {}
        self._later = Deferred()
        self._rows: deque[dict[str, Any]] = deque(maxlen=keep * len(self._layers))

    on_start = staticmethod(refuse_without_hooks)

    def on_phase(self, name: str, step: int) -> None:
        if name == "forward" and step % self.every == 0 and not self._found:
            for index, layer in enumerate(self._layers):
                look = partial(self._look, index)
                self._hooks.enter_context(layer.register_forward_hook(look, with_kwargs=True))
        elif name == "backward":
            self._hooks.close()  # recomputed layers and further micro-batches are not observed
        elif name == "end":
            if len(self._found) == len(self._layers):
                rows = [self._found[index] for index in range(len(self._layers))]
                self._later.put(step, torch.stack(rows))
            self._found = {}
            self._take(self._later.ready())

    def rows(self) -> list[dict[str, Any]]:
        """One row per observed step and layer: step, layer, and NAMES. Waits for the device."""
        self._take(self._later.all())
        return list(self._rows)

    def close(self) -> None:
        """Pass pending numbers to the writers. Waits for the device."""
        self._hooks.close()
        self._take(self._later.all())

    def _take(self, arrived: Any) -> None:
        for step, values in arrived:
            named = {}
            for layer, found in enumerate(values.tolist()):
                row = dict(zip(NAMES, found, strict=True))
                self._rows.append({"step": step, "layer": layer} | row)
                named |= {f"layer{layer}/{name}": value for name, value in row.items()}
            for writer in self.writers:
                writer.write(step, named)

    def _look(self, index: int, layer: NSAAttention, args: tuple, kwargs: dict, _: Any) -> None:
        self._found[index] = look(layer, *args, **kwargs)


@torch.no_grad()
def look(
    layer: NSAAttention,
    x: Tensor,
    rotary: Any = None,
    cu_seqlens: Tensor | None = None,
    *,
    blocks: Tensor | None = None,
    return_blocks: bool = False,
) -> Tensor:
    """Compute the NAMES of this layer for the input of its forward, fp32 on the device.

    Raises ValueError for packed sequences.
    """
    if cu_seqlens is not None:
        raise ValueError("packed sequences cannot be looked into; a batch of one length can")
    inputs = layer_inputs(layer, x, rotary, blocks)
    backend = registry.taken(layer.config.backend, inputs)
    nan = x.new_full((), float("nan"), dtype=torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        selected = [nan] * 6
        if "slc" in inputs.branches:
            inputs = with_blocks(inputs, backend) if blocks is None else inputs
            selected = distances(inputs.blocks, inputs.config)
            selected += keys_attended(inputs.blocks, inputs.config)
        norms = dict.fromkeys(BRANCHES, nan)
        for branch, o in branches_of(backend, inputs, lambda *_: None)[0].items():
            norms[branch] = torch.linalg.vector_norm(o, dim=-1, dtype=wide(o.dtype)).mean()
        found = [*gate_statistics(inputs.gates), *selected, *norms.values()]
        return torch.stack([value.float() for value in found])


def layer_inputs(
    layer: NSAAttention, x: Tensor, rotary: Any = None, blocks: Tensor | None = None
) -> Inputs:
    """Inputs of this layer's attention for hidden states x [B, T, E], and another's blocks."""
    return checked(**layer.arguments(x, rotary, blocks=blocks), scale=None)


def gate_statistics(gates: Tensor) -> list[Tensor]:
    """Means of g_cmp, g_slc, g_win and of the entropy in nats, the largest gate, and the share of
    collapsed triples, for gates [..., 3]."""
    gates = gates.to(wide(gates.dtype))
    shares = gates / gates.sum(-1, keepdim=True)
    entropy = torch.special.entr(shares).sum(-1).mean()
    collapsed = (shares.amax(-1) > COLLAPSED).to(gates.dtype).mean()
    return [*gates.flatten(0, -2).mean(0), entropy, gates.amax(), collapsed]


def distances(blocks: Tensor, config: NSAConfig) -> list[Tensor]:
    """Mean distance in blocks, that of blocks not forced, share of forced; blocks [B, T, HKV, N].

    A query's own block has distance 0; empty slots (-1) are ignored.
    """
    tokens = torch.arange(blocks.shape[1], device=blocks.device)
    own = (tokens // config.select_block)[:, None, None]
    there = blocks >= 0
    forced = there & ((blocks < config.select_initial) | (blocks > own - config.select_local))
    free = there & ~forced
    back, count = own - blocks, there.sum()
    return [(back * there).sum() / count, (back * free).sum() / free.sum(), forced.sum() / count]


def keys_attended(blocks: Tensor, config: NSAConfig) -> list[Tensor]:
    """Mean and maximum number of selected keys that a query attends to, and share of queries that
    have the maximum; blocks [B, T, HKV, N] without duplicates. Later keys do not count."""
    size = config.select_block
    tokens = torch.arange(blocks.shape[1], device=blocks.device)[:, None, None]
    keys = (tokens + 1 - blocks * size).clamp(0, size) * (blocks >= 0)
    keys = keys.sum(-1).float()
    return [keys.mean(), keys.amax(), (keys == keys.amax()).float().mean()]
