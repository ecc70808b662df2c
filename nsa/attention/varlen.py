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

    The first seven arguments are as in flash_attn_varlen_func, and so is their meaning where a
    sequence has fewer queries than keys: they are its newest tokens, and none has more.

    Args:
        q: [TOTAL, HQ, D].
        k, v: [TOTAL_K, HKV, D] and [TOTAL_K, HKV, DV], or a mapping with "cmp", "slc" and "win".
        cu_seqlens_q, cu_seqlens_k: [N + 1] int32 from 0 to TOTAL and to TOTAL_K. Where they are
            equal pass the same tensor twice to avoid a comparison, which waits for the GPU.
        max_seqlen_q, max_seqlen_k: the longest sequences. Nothing is sized by them, so they are
            only checked against each other.
        gates: [TOTAL, HQ, 3].
        softmax_scale: `scale` of `nsa_attention`.
        causal: must be True; NSA is causal by definition.
        blocks: [TOTAL, HKV, N].
        options: phi, branches, sinks, return_lse, q_start [N], compressed, backend and strict, as
            in `nsa_attention`, compressed with a batch.

    Returns o, or with return_lse (o, lse [TOTAL, HQ, 3], combined [TOTAL, HQ]).

    Raises:
        ValueError: more queries than keys, causal=False, a tensor with a batch; and as
            `nsa_attention`.
    """
    if not causal:
        raise ValueError("causal=False: no query of NSA sees a later key; causal=True would do")
    if max_seqlen_q > max_seqlen_k:
        raise ValueError(
            f"max_seqlen_q={max_seqlen_q} and max_seqlen_k={max_seqlen_k}: a sequence has a key "
            "for each query"
        )
    q, gates = _batched("q", q, "HQ, D"), _batched("gates", gates, "HQ, 3")
    k, v = _batched("k", k, "HKV, D"), _batched("v", v, "HKV, DV")
    if blocks is not None:
        blocks = _batched("blocks", blocks, "HKV, N")
    options |= {"cu_seqlens": cu_seqlens_k, "blocks": blocks, "scale": softmax_scale}
    if "q_start" in options or not _equal(cu_seqlens_q, cu_seqlens_k):
        options["cu_seqlens_q"] = cu_seqlens_q
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


def _equal(of_q: Tensor, of_k: Tensor) -> bool:
    """True if the bounds are equal, so that query t stands at key t."""
    if of_q is of_k:
        return True
    for name, x in (("cu_seqlens_q", of_q), ("cu_seqlens_k", of_k)):
        check_tensor(name, x, "[N + 1] int32")
    return of_q.tolist() == of_k.tolist()
