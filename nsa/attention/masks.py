"""The dense masks of the two backends that hold T x T tensors."""

from collections.abc import Iterator

import torch
from torch import Tensor

from nsa.attention.inputs import Inputs
from nsa.attention.registry import Note
from nsa.attention.scoring import select_blocks
from nsa.reference.compress import compress_keys, compress_values
from nsa.reference.nsa import compressed_visible, window_visible
from nsa.reference.select import selected_tokens


def visible_by_branch(inputs: Inputs, note: Note) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(branch, k, v, visible [B or 1, HKV or 1, T, S]) for each branch asked for."""
    q, k, v, config = inputs.q, inputs.k, inputs.v, inputs.config
    positions = torch.arange(q.shape[1], device=q.device)
    k_cmp = compress_keys(k["cmp"], inputs.phi, config) if "cmp" in k else None
    if "cmp" in inputs.branches:
        v_cmp = compress_values(v["cmp"], inputs.phi, config)
        yield "cmp", k_cmp, v_cmp, compressed_visible(positions, k_cmp.shape[1], config)
    if "slc" in inputs.branches:
        blocks = inputs.blocks
        if blocks is None:
            blocks = select_blocks(q, k_cmp, config, inputs.scale)
            note("score", "score-chunks")
        visible = selected_tokens(blocks, q.shape[1], config) & (positions <= positions[:, None])
        yield "slc", k["slc"], v["slc"], visible
    if "win" in inputs.branches:
        yield "win", k["win"], v["win"], window_visible(positions, config)
