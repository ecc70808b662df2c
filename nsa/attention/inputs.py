"""What one attention call takes, checked once, so that no backend checks it again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from nsa.blocks import count_selectable
from nsa.config import NSAConfig
from nsa.reference.compress import Phi
from nsa.reference.nsa import BRANCHES

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Inputs:
    """The tensors and sizes of a call. k and v hold an entry for each branch that needs one."""

    q: Tensor  # [B, T, HQ, D]
    k: Mapping[str, Tensor]  # each [B, T, HKV, D]
    v: Mapping[str, Tensor]  # each [B, T, HKV, DV]
    gates: Tensor  # [B, T, HQ, 3]
    config: NSAConfig
    phi: Phi
    branches: tuple[str, ...]
    scale: float
    blocks: Tensor | None = None  # [B, T, HKV, N] int32: a selection made by the caller
    cu_seqlens: Tensor | None = None  # [N + 1] int32, B = 1

    @property
    def group(self) -> int:
        """G: query heads that share one KV head."""
        return self.q.shape[2] // self.kv_heads

    @property
    def kv_heads(self) -> int:
        return next(iter(self.k.values())).shape[2]

    @property
    def value_dim(self) -> int:
        return next(iter(self.v.values())).shape[3]

    def sequences(self) -> Iterator["Inputs"]:
        """Each packed sequence as inputs of its own, not packed; empty ones are left out."""
        bounds = self.cu_seqlens.tolist()
        for start, end in pairwise(bounds):
            if start == end:
                continue
            rows = slice(start, end)
            yield replace(
                self,
                q=self.q[:, rows],
                k={name: x[:, rows] for name, x in self.k.items()},
                v={name: x[:, rows] for name, x in self.v.items()},
                gates=self.gates[:, rows],
                blocks=None if self.blocks is None else self.blocks[:, rows],
                cu_seqlens=None,
            )


def checked(
    q: Tensor,
    k: Tensor | Mapping[str, Tensor],
    v: Tensor | Mapping[str, Tensor],
    gates: Tensor,
    config: NSAConfig,
    *,
    phi: Phi | None,
    cu_seqlens: Tensor | None,
    blocks: Tensor | None,
    branches: Sequence[str],
    scale: float | None,
) -> Inputs:
    """The inputs of a call, or a ValueError that says what it got and what would do."""
    branches = _branches(branches)
    if q.ndim != 4:
        raise ValueError(f"q must be [B, T, HQ, D], got shape {tuple(q.shape)}")
    if q.dtype not in DTYPES:
        raise ValueError(f"q has dtype {q.dtype}; these would do: {', '.join(map(str, DTYPES))}")
    if q.shape[0] < 1 or q.shape[1] < 1:
        raise ValueError(f"q has shape {tuple(q.shape)}: needs at least one sequence and one token")
    scoring = "slc" in branches and blocks is None
    needs_k = [b for b in BRANCHES if b in branches or (b == "cmp" and scoring)]
    k = _by_branch("k", k, needs_k)
    v = _by_branch("v", v, branches)
    _heads("k", k, q, q.shape[3])
    _heads("v", v, q, None)
    kv_heads = next(iter(k.values())).shape[2]
    if next(iter(v.values())).shape[2] != kv_heads:
        raise ValueError(
            f"k has {kv_heads} KV heads and v has {next(iter(v.values())).shape[2]}; "
            "they must be the same"
        )
    if q.shape[2] % kv_heads:
        raise ValueError(f"HQ={q.shape[2]} query heads are not a multiple of HKV={kv_heads}")
    if gates.shape != (*q.shape[:3], 3):
        raise ValueError(
            f"gates must be [B, T, HQ, 3] = {(*q.shape[:3], 3)}, got {tuple(gates.shape)}"
        )
    if not gates.is_floating_point():
        raise ValueError(f"gates must be floating point, got {gates.dtype}")
    phi = phi or Phi()
    for name, tensor in [("gates", gates), *(("phi", t) for t in phi.tensors())]:
        _device(name, tensor, q)
    if blocks is not None:
        _blocks(blocks, q, kv_heads)
    if cu_seqlens is not None:
        _cu_seqlens(cu_seqlens, q)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    return Inputs(q, k, v, gates, config, phi, branches, scale, blocks, cu_seqlens)


def check_blocks(inputs: Inputs) -> None:
    """Strict mode's look at a caller's selection: in range, ascending, no duplicates. Syncs."""
    blocks = inputs.blocks
    count = count_selectable(inputs.q.shape[1], inputs.config)
    if int(blocks.max()) >= count or int(blocks.min()) < -1:
        raise ValueError(
            f"blocks holds indices from {int(blocks.min())} to {int(blocks.max())}; "
            f"legal are 0..{count - 1}, and -1 for an empty slot"
        )
    ranks = torch.where(blocks < 0, count, blocks)
    step = ranks.diff(dim=-1)
    if bool(((step < 0) | ((step == 0) & (ranks[..., 1:] < count))).any()):
        raise ValueError("blocks must be ascending without duplicates, with the empty slots last")


def _branches(branches: Sequence[str]) -> tuple[str, ...]:
    if isinstance(branches, str):
        branches = (branches,)
    unknown = [b for b in branches if b not in BRANCHES]
    if unknown or not branches:
        raise ValueError(f"branches={tuple(branches)!r}; choose at least one of {BRANCHES}")
    return tuple(b for b in BRANCHES if b in branches)


def _by_branch(name, x, needed) -> dict[str, Tensor]:
    if isinstance(x, Tensor):
        return dict.fromkeys(needed, x)
    missing = [b for b in needed if b not in x]
    if missing:
        raise ValueError(f"{name} has no entry for {', '.join(missing)}; it has {sorted(x)}")
    return {b: x[b] for b in needed}


def _heads(name: str, tensors: Mapping[str, Tensor], q: Tensor, dim: int | None) -> None:
    first = next(iter(tensors.values()))
    for branch, x in tensors.items():
        wanted = (
            *q.shape[:2],
            first.shape[2] if first.ndim == 4 else "HKV",
            dim or first.shape[-1],
        )
        if x.ndim != 4 or tuple(x.shape) != wanted or 0 in x.shape:
            raise ValueError(
                f"{name}[{branch!r}] has shape {tuple(x.shape)}, wanted {wanted} "
                f"to go with q of shape {tuple(q.shape)}"
            )
        if x.dtype != q.dtype:
            raise ValueError(f"{name}[{branch!r}] is {x.dtype} and q is {q.dtype}; make them equal")
        _device(f"{name}[{branch!r}]", x, q)


def _device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise ValueError(
            f"{name} is on {tensor.device} and q on {q.device}; put them on one device"
        )


def _blocks(blocks: Tensor, q: Tensor, kv_heads: int) -> None:
    wanted = (*q.shape[:2], kv_heads)
    if blocks.ndim != 4 or blocks.shape[:3] != wanted or blocks.shape[3] < 1:
        raise ValueError(f"blocks must be {wanted} + (N,), got {tuple(blocks.shape)}")
    if blocks.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"blocks must be int32 or int64, got {blocks.dtype}")
    _device("blocks", blocks, q)


def _cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    if q.shape[0] != 1:
        raise ValueError(f"packed sequences need B=1, got B={q.shape[0]}: lay them end to end")
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens must be one-dimensional int32, got {cu_seqlens.dtype} of shape "
            f"{tuple(cu_seqlens.shape)}"
        )
    bounds = cu_seqlens.tolist()
    rising = all(a <= b for a, b in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != q.shape[1] or not rising:
        raise ValueError(
            f"cu_seqlens={bounds} must rise from 0 to T={q.shape[1]}, "
            "one entry more than there are sequences"
        )
