"""Attention put together of branches that each have a backend of their own, for comparisons."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nsa.attention.api import nsa_attention
from nsa.model import layer
from nsa.reference.nsa import BRANCHES


@contextlib.contextmanager
def branchwise(backends: Mapping[str, str | None], *, safe_packing: bool = True) -> Iterator[None]:
    """Every NSAAttention of this process calls `attention` below, until the end of the context.

    Nothing changes where no branch has a backend of its own and packing is safe.
    """
    own = {branch: name for branch, name in backends.items() if name is not None}
    if not own and safe_packing:
        yield
        return

    def attention(*args: Any, **options: Any) -> Tensor:
        return by_branches(*args, backends=own, safe_packing=safe_packing, **options)

    before = layer.nsa_attention
    layer.nsa_attention = attention
    try:
        yield
    finally:
        layer.nsa_attention = before


def by_branches(
    q: Tensor,
    k: Mapping[str, Tensor],
    v: Mapping[str, Tensor],
    gates: Tensor,
    config: Any,
    *,
    backends: Mapping[str, str],
    backend: str = "auto",
    branches: Sequence[str] = BRANCHES,
    safe_packing: bool = True,
    **options: Any,
) -> Tensor:
    """`nsa_attention` as a sum of one call for each branch, with `backends[branch]` or `backend`.

    safe_packing=False is a specimen of a mistake: the branches' outputs are collected in a tensor
    through `.data`, behind autograd's back, so that no gradient reaches what is before them.
    """
    outputs = [
        nsa_attention(
            q,
            # "slc" needs the compressed keys to score its blocks.
            {name: k[name] for name in (branch, "cmp") if name in k and branch in (name, "slc")},
            {branch: v[branch]},
            gates,
            config,
            backend=backends.get(branch, backend),
            branches=(branch,),
            **options,
        )
        for branch in branches
    ]
    if safe_packing:
        return sum(outputs[1:], outputs[0])
    packed = torch.empty_like(outputs[0])[None].repeat(len(outputs), 1, 1, 1, 1)
    for place, o in zip(packed, outputs, strict=True):
        place.data.copy_(o.data)
    return packed.sum(0)
