"""What gather and packed share: everything but the selected branch, in unbroken runs of keys."""

from collections.abc import Callable

from torch import Tensor

from nsa.attention.inputs import Inputs
from nsa.attention.registry import Note
from nsa.attention.scoring import select_blocks
from nsa.attention.span import span_attention
from nsa.blocks import compressed_span, count_selectable, window_span
from nsa.reference.compress import compress_keys, compress_values

Selected = Callable[[Inputs, Tensor, Note], Tensor]  # (inputs, blocks, note) -> o


def run_with_selected(inputs: Inputs, note: Note, selected: Selected) -> dict[str, Tensor]:
    """o [B, T, HQ, DV] of each branch, the selected one by `selected`."""
    q, k, v, config = inputs.q, inputs.k, inputs.v, inputs.config
    outputs = {}
    k_cmp = compress_keys(k["cmp"], inputs.phi, config) if "cmp" in k else None
    if "cmp" in inputs.branches:
        v_cmp = compress_values(v["cmp"], inputs.phi, config)
        outputs["cmp"] = span_attention(q, k_cmp, v_cmp, compressed_span(config), inputs.scale)
        note("cmp", "span-chunks")
    if "slc" in inputs.branches:
        outputs["slc"] = selected(inputs, chosen_blocks(inputs, k_cmp, note), note)
    if "win" in inputs.branches:
        span = window_span(config)
        outputs["win"] = span_attention(q, k["win"], v["win"], span, inputs.scale)
        note("win", "span-chunks")
    return outputs


def empty_slots(blocks: Tensor, count: int) -> Tensor:
    """Slots of blocks [..., N] that select nothing: outside 0..count-1, or a block named before.

    Indices ascend, so equal ones are neighbours.
    """
    empty = (blocks < 0) | (blocks >= count)
    empty[..., 1:] |= blocks[..., 1:] == blocks[..., :-1]
    return empty


def chosen_blocks(inputs: Inputs, k_cmp: Tensor | None, note: Note) -> Tensor:
    """The caller's selection, or a scored one without slots that no query of the call can fill."""
    if inputs.blocks is not None:
        return inputs.blocks
    note("score", "score-chunks")
    blocks = select_blocks(inputs.q, k_cmp, inputs.config, inputs.scale)
    return blocks[..., : count_selectable(inputs.q.shape[1], inputs.config)]
