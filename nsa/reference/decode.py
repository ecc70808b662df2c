"""New tokens against what a cache holds: the last rows of the whole operation, and nothing else."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nsa.blocks import count_compressed
from nsa.config import NSAConfig
from nsa.reference.attend import attend, attention_probs
from nsa.reference.nsa import combine, compressed_visible, sunk, window_visible
from nsa.reference.select import importance, select, selected_tokens


def decode(
    q: Float[Tensor, "B N HQ D"],
    k: Mapping[str, Tensor],
    v: Mapping[str, Tensor],
    gates: Float[Tensor, "B N HQ 3"],
    config: NSAConfig,
    lengths: Int[Tensor, " B"],
    counts: Int[Tensor, " B"],
    *,
    branches: Sequence[str],
    scale: float,
    sinks: Float[Tensor, " HQ *n"] | None = None,
    blocks: Int[Tensor, "B N HKV n"] | None = None,
    selection: Int[Tensor, "B N HKV n"] | None = None,
) -> Float[Tensor, "B N HQ DV"]:
    """Eq. 5 for the queries at positions lengths[b] + i, i < counts[b]; other rows are 0.

    What is attended to is in k and v with the new tokens' own keys: "cmp" [B, C, HKV, *] the
    compressed blocks from the first on, "slc" [B, S, HKV, *] the tokens from position 0 on, "win"
    [B, w - 1 + N, HKV, *] those from lengths[b] - w + 1 on. What stands behind a sequence's end, or
    before its beginning, is not looked at. In fp64 the rows equal those of `nsa.reference.nsa.nsa`
    over the whole sequence. `blocks` are attended to instead of scored ones, which are otherwise
    written to `selection`.
    """
    o = q.new_zeros(*q.shape[:3], next(iter(v.values())).shape[-1])
    for b, (held, new) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        if not new:
            continue
        total = held + new
        positions = torch.arange(held, total, device=q.device)
        keys = torch.arange(total, device=q.device)
        rows, outputs, lse = q[b : b + 1, :new], {}, {}
        pooled = count_compressed(total, config)
        visible = compressed_visible(positions, pooled, config)
        if "cmp" in branches:
            k_cmp, v_cmp = (x["cmp"][b : b + 1, :pooled] for x in (k, v))
            outputs["cmp"], lse["cmp"] = attend(rows, k_cmp, v_cmp, visible, scale)
        if "slc" in branches and blocks is not None:
            chosen = blocks[b : b + 1, :new]
        elif "slc" in branches:
            p_cmp, _ = attention_probs(rows, k["cmp"][b : b + 1, :pooled], visible, scale)
            # Blocks without a compressed key yet have importance 0 and can be selected.
            scores = importance(p_cmp, config, tokens=total)
            chosen = select(scores, config, first_position=held)
            if selection is not None:
                selection[b, :new] = chosen[0]
        if "slc" in branches:
            inside = selected_tokens(chosen, total, config) & (keys <= positions[:, None])
            k_slc, v_slc = k["slc"][b : b + 1, :total], v["slc"][b : b + 1, :total]
            outputs["slc"], lse["slc"] = attend(rows, k_slc, v_slc, inside, scale)
        if "win" in branches:
            first = held - config.window + 1  # the position of column 0
            recent = slice(max(0, -first), config.window - 1 + new)
            k_win, v_win = k["win"][b : b + 1, recent], v["win"][b : b + 1, recent]
            seen = window_visible(positions, config, keys[max(0, first) :])
            outputs["win"], lse["win"] = attend(rows, k_win, v_win, seen, scale)
        outputs = sunk(outputs, lse, sinks)
        o[b, :new] = combine(gates[b : b + 1, :new], outputs)[0].to(o.dtype)
    return o
