"""Native Sparse Attention, whole: three branches and their gated sum. Read this file first.

Source: arXiv 2502.11089v2, Eq. 3-12. Everything is an explicit mask over all keys, so memory
grows with T squared; that is what makes it easy to believe. In float64 it is the project's oracle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from nsa.blocks import count_compressed
from nsa.config import BRANCHES, NSAConfig
from nsa.reference.attend import attend, attention_probs, without_sink
from nsa.reference.compress import Phi, compress_keys, compress_values
from nsa.reference.select import importance, select, selected_tokens


@dataclass
class Result:
    """Results of one call; `branches` and `lse` have an entry for each requested branch."""

    o: Tensor  # [B, T, HQ, DV]
    branches: dict[str, Tensor]  # each [B, T, HQ, DV], before the gates
    lse: dict[str, Tensor]  # each [B, T, HQ], natural log, at least fp32, of the keys alone
    blocks: Tensor | None = None  # [B, T, HKV, N] int32, indices within each sequence
    importance: Tensor | None = None  # [B, T, HKV, NB]; None for packed sequences


def nsa(
    q: Float[Tensor, "B T HQ D"],
    k: Mapping[str, Tensor],
    v: Mapping[str, Tensor],
    gates: Float[Tensor, "B T HQ 3"],
    config: NSAConfig,
    *,
    phi: Phi | None = None,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    blocks: Int[Tensor, "B T HKV N"] | None = None,
    branches: Sequence[str] = BRANCHES,
    scale: float | None = None,
    sinks: Float[Tensor, " HQ *n"] | None = None,
    q_start: int | Int[Tensor, " N"] = 0,
    cu_seqlens_q: Int[Tensor, " N1"] | None = None,
    compressed: tuple[Tensor, Tensor | None] | None = None,
) -> Result:
    """Eq. 5: o = g_cmp o_cmp + g_slc o_slc + g_win o_win.

    k[branch] is [B, T, HKV, D] and v[branch] [B, T, HKV, DV]; "slc" also needs k["cmp"] to score
    blocks, unless `blocks` hands the selection in. `scale` defaults to D ** -0.5. With
    `cu_seqlens` [N + 1] (B = 1) sequences are independent. Any floating dtype; fp64 is
    exact. No gradient flows through the selection. With `sinks` [HQ], or [HQ, 3] for the branches,
    the denominator of each softmax has e^sink as well, which no value belongs to; the selection is
    scored without. `compressed` has keys and values [B, C, HKV, *] to use instead of phi's.

    With `q_start`, or fewer queries than keys, the queries are rows q_start.. of the whole call;
    with `cu_seqlens_q` [N + 1] those of sequence n are its rows q_start[n].. .
    """
    phi = phi or Phi()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = {"phi": phi, "branches": branches, "scale": scale, "sinks": sinks}
    options |= {"compressed": compressed}
    tokens = next(iter(k.values())).shape[1]
    if cu_seqlens_q is None and q.shape[1] != tokens:
        options["cu_seqlens"] = cu_seqlens
        return _rows_of_the_whole(q, k, v, gates, config, q_start, tokens, blocks, options)
    if cu_seqlens is not None:
        bounds = of_q = cu_seqlens.tolist()
        starts = [0] * len(bounds[1:])
        if cu_seqlens_q is not None:
            of_q, starts = cu_seqlens_q.tolist(), q_start.tolist()
        return _packed(q, k, v, gates, config, (bounds, of_q, starts), blocks, options)

    positions = torch.arange(tokens, device=q.device)
    outputs, lse, scores = {}, {}, None
    if compressed is not None:
        k_cmp, v_cmp = compressed
    else:
        k_cmp = compress_keys(k["cmp"], phi, config) if "cmp" in k else None
        v_cmp = compress_values(v["cmp"], phi, config) if "cmp" in branches else None

    if "cmp" in branches:
        visible = compressed_visible(positions, k_cmp.shape[1], config)
        outputs["cmp"], lse["cmp"] = attend(q, k_cmp, v_cmp, visible, scale)
    if "slc" in branches:
        if blocks is None:
            with torch.no_grad():
                visible = compressed_visible(positions, k_cmp.shape[1], config)
                p_cmp, _ = attention_probs(q, k_cmp, visible, scale)
                scores = importance(p_cmp, config)
                blocks = select(scores, config)
        causal = positions <= positions[:, None]
        visible = selected_tokens(blocks, q.shape[1], config) & causal
        outputs["slc"], lse["slc"] = attend(q, k["slc"], v["slc"], visible, scale)
    if "win" in branches:
        visible = window_visible(positions, config)
        outputs["win"], lse["win"] = attend(q, k["win"], v["win"], visible, scale)

    outputs = sunk(outputs, lse, sinks)
    return Result(combine(gates, outputs), outputs, lse, blocks, scores)


def sunk(
    branches: Mapping[str, Float[Tensor, "B T HQ DV"]],
    lse: Mapping[str, Float[Tensor, "B T HQ"]],
    sinks: Float[Tensor, " HQ *n"] | None,
) -> Mapping[str, Float[Tensor, "B T HQ DV"]]:
    """The branches' outputs under sinks, from those without."""
    if sinks is None:
        return branches
    by_branch = dict.fromkeys(BRANCHES, sinks)
    if sinks.ndim == 2:
        by_branch = dict(zip(BRANCHES, sinks.unbind(-1), strict=True))
    shares = {b: without_sink(lse[b], by_branch[b])[..., None] for b in branches}
    return {b: (o * shares[b]).to(o.dtype) for b, o in branches.items()}


def combine(
    gates: Float[Tensor, "B T HQ 3"], branches: Mapping[str, Float[Tensor, "B T HQ DV"]]
) -> Float[Tensor, "B T HQ DV"]:
    """Eq. 5, over the branches that were computed; a branch that was not counts as 0."""
    weights = dict(zip(BRANCHES, gates[..., None, :].unbind(-1), strict=True))
    return sum(weights[name] * o for name, o in branches.items())


def compressed_visible(
    positions: Int[Tensor, " T"], compressed: int, config: NSAConfig
) -> Bool[Tensor, "1 1 T C"]:
    """Position t sees compressed block i when its last token i d + l - 1 is not later than t."""
    starts = torch.arange(compressed, device=positions.device) * config.compress_stride
    last_tokens = starts + config.compress_block - 1
    return (last_tokens <= positions[:, None])[None, None]


def window_visible(
    positions: Int[Tensor, " T"], config: NSAConfig, keys: Int[Tensor, " S"] | None = None
) -> Bool[Tensor, "1 1 T S"]:
    """Position t sees the keys s with t - w < s <= t. Keys stand there too, or at `keys`."""
    distance = positions[:, None] - (positions if keys is None else keys)
    return ((distance >= 0) & (distance < config.window))[None, None]


def _rows_of_the_whole(q, k, v, gates, config, q_start, tokens, blocks, options) -> Result:
    """The rows of a call with as many queries as `tokens`, of which the others are 0."""

    def whole(x: Tensor, value: int = 0) -> Tensor:
        around = q_start, tokens - q_start - x.shape[1]
        return torch.nn.functional.pad(x, (0, 0, 0, 0, *around), value=value)

    blocks = None if blocks is None else whole(blocks, -1)
    found = nsa(whole(q), k, v, whole(gates), config, blocks=blocks, **options)
    rows = slice(q_start, q_start + q.shape[1])
    return Result(
        o=found.o[:, rows],
        branches={b: x[:, rows] for b, x in found.branches.items()},
        lse={b: x[:, rows] for b, x in found.lse.items()},
        blocks=None if found.blocks is None else found.blocks[:, rows],
        importance=None if found.importance is None else found.importance[:, rows],
    )


def _packed(q, k, v, gates, config, places, blocks, options) -> Result:
    """Each sequence run alone, the results laid end to end.

    places: bounds of the keys and of the queries, and the position of each first query.
    """
    parts, first, compressed = [], 0, options["compressed"]
    bounds, of_q, starts = places
    each = zip(pairwise(bounds), pairwise(of_q), starts, strict=True)
    for (key, last_key), (start, end), position in each:
        of_cmp = slice(first, first + count_compressed(last_key - key, config))
        first = of_cmp.stop
        if start == end:
            continue
        rows, keys = slice(start, end), slice(key, last_key)
        if compressed is not None:
            options["compressed"] = tuple(x if x is None else x[:, of_cmp] for x in compressed)
        parts.append(
            nsa(
                q[:, rows],
                {name: x[:, keys] for name, x in k.items()},
                {name: x[:, keys] for name, x in v.items()},
                gates[:, rows],
                config,
                blocks=None if blocks is None else blocks[:, rows],
                q_start=position,
                **options,
            )
        )
    branches = options["branches"]
    return Result(
        o=torch.cat([part.o for part in parts], dim=1),
        branches={b: torch.cat([part.branches[b] for part in parts], dim=1) for b in branches},
        lse={b: torch.cat([part.lse[b] for part in parts], dim=1) for b in branches},
        blocks=torch.cat([p.blocks for p in parts], dim=1) if "slc" in branches else None,
    )
