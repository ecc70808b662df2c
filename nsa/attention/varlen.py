"""The operation with the packed-sequence interface of flash-attn: [TOTAL, H, D], no batch."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nsa.attention.api import nsa_attention
from nsa.attention.inputs import check_tensor
from nsa.config import NSAConfig

Packed = Tensor | Mapping[str, Tensor]


def nsa_varlen_func(
    q: Tensor,
    k: Packed,
    v: Packed,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    gates: Tensor,
    config: NSAConfig,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    blocks: Tensor | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Bitwise `nsa_attention` with cu_seqlens: o [TOTAL, HQ, DV] of concatenated sequences.

    The first seven arguments are as in flash_attn_varlen_func. NSA is self-attention: query t is
    at the position of key t, so keys have the queries' lengths.

    Args:
        q: [TOTAL, HQ, D].
        k, v: [TOTAL, HKV, D] and [TOTAL, HKV, DV], or a mapping with "cmp", "slc" and "win".
        cu_seqlens_q, cu_seqlens_k: [N + 1] int32 from 0 to TOTAL, equal. Pass the same tensor twice
            to avoid a comparison, which waits for the GPU.
        max_seqlen_q, max_seqlen_k: the longest sequence, equal. Nothing is sized by them, so
            they are only checked against each other.
        gates: [TOTAL, HQ, 3].
        softmax_scale: `scale` of `nsa_attention`.
        causal: must be True; NSA is causal by definition.
        blocks: [TOTAL, HKV, N].
        options: phi, branches, sinks, return_lse, backend and strict, as in `nsa_attention`.

    Returns o, or with return_lse (o, lse [TOTAL, HQ, 3], combined [TOTAL, HQ]).

    Raises:
        ValueError: lengths of keys that differ from the queries', causal=False, a tensor with a
            batch; and as `nsa_attention`.
    """
    if not causal:
        raise ValueError("causal=False: no query of NSA sees a later key; causal=True would do")
    _equal_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    q, gates = _batched("q", q, "HQ, D"), _batched("gates", gates, "HQ, 3")
    k, v = _batched("k", k, "HKV, D"), _batched("v", v, "HKV, DV")
    if blocks is not None:
        blocks = _batched("blocks", blocks, "HKV, N")
    options |= {"cu_seqlens": cu_seqlens_q, "blocks": blocks, "scale": softmax_scale}
    found = nsa_attention(q, k, v, gates, config, **options)
    return tuple(x[0] for x in found) if isinstance(found, tuple) else found[0]


def _batched(name: str, x: Packed, sizes: str) -> Packed:
    """x, or each tensor of a mapping, with a batch dimension of 1."""
    if isinstance(x, Mapping):
        return {branch: _batched(f"{name}[{branch!r}]", one, sizes) for branch, one in x.items()}
    check_tensor(name, x, f"[TOTAL, {sizes}]")
    if x.ndim != 3:
        raise ValueError(
            f"{name} must be [TOTAL, {sizes}], sequences end to end without a batch, got shape "
            f"{tuple(x.shape)}; nsa_attention takes [B, T, {sizes}]"
        )
    return x[None]


def _equal_lengths(of_q: Tensor, of_k: Tensor, longest_q: int, longest_k: int) -> None:
    hint = (
        "query t of NSA stands at key t, so that both have one length; for new tokens against keys "
        "of a cache there is nsa_decode"
    )
    if longest_q != longest_k:
        raise ValueError(f"max_seqlen_q={longest_q} and max_seqlen_k={longest_k}: {hint}")
    if of_q is of_k:
        return
    for name, x in (("cu_seqlens_q", of_q), ("cu_seqlens_k", of_k)):
        check_tensor(name, x, "[N + 1] int32")
    if (lengths_q := of_q.tolist()) != (lengths_k := of_k.tolist()):
        raise ValueError(f"cu_seqlens_q={lengths_q} and cu_seqlens_k={lengths_k} differ: {hint}")
