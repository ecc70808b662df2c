"""Inputs of one attention call, checked once, so that no backend checks them again."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from nsa.attention.span import wide
from nsa.blocks import count_compressed, count_selectable
from nsa.config import NSAConfig, other_than
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
    blocks: Tensor | None = None  # [B, T, HKV, N] int32 or int64: a selection made by the caller
    cu_seqlens: Tensor | None = None  # [N + 1] int32 or int64, B = 1
    sinks: Tensor | None = None  # [HQ, 3] in fp32, or fp64 for fp64 inputs
    return_lse: bool = False
    bounds: tuple[int, ...] = ()  # cu_seqlens on the host; empty if it could not be read

    @property
    def group(self) -> int:
        """Number of query heads that share one KV head, G."""
        return self.q.shape[2] // self.kv_heads

    @property
    def kv_heads(self) -> int:
        return next(iter(self.k.values())).shape[2]

    @property
    def value_dim(self) -> int:
        return next(iter(self.v.values())).shape[3]

    @property
    def needs_lse(self) -> bool:
        """True if the branches' log-sum-exps are returned or needed to apply sinks."""
        return self.return_lse or self.sinks is not None

    def sequences(self) -> Iterator["Inputs"]:
        """Each packed sequence as separate inputs, not packed; empty ones are left out."""
        if not self.bounds:
            raise ValueError(
                "this backend takes packed sequences one by one and needs their lengths on the "
                "host, which a CUDA graph or torch.compile cannot give; backend 'triton' does not"
            )
        for start, end in pairwise(self.bounds):
            if start < end:
                rows = slice(start, end)
                k, v = ({b: x[:, rows] for b, x in side.items()} for side in (self.k, self.v))
                blocks = None if self.blocks is None else self.blocks[:, rows]
                cut = {"q": self.q[:, rows], "k": k, "v": v, "gates": self.gates[:, rows]}
                yield replace(self, **cut, blocks=blocks, cu_seqlens=None, bounds=())


def checked(
    q: Tensor,
    k: Tensor | Mapping[str, Tensor],
    v: Tensor | Mapping[str, Tensor],
    gates: Tensor,
    config: NSAConfig,
    *,
    phi: Phi | None = None,
    cu_seqlens: Tensor | None = None,
    blocks: Tensor | None = None,
    branches: Sequence[str] = BRANCHES,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Inputs:
    """Return the inputs of a call; ValueError with the values received and accepted."""
    given = (branches,) if isinstance(branches, str) else tuple(branches)
    branches = tuple(b for b in BRANCHES if b in given)
    if not branches or not set(given) <= set(BRANCHES):
        raise ValueError(f"branches={given!r}; choose at least one of {BRANCHES}")
    if not isinstance(config, NSAConfig):
        raise ValueError(f"config {other_than('NSAConfig', config)}")
    check_tensor("q", q, "[B, T, HQ, D]")
    if q.ndim != 4:
        raise ValueError(f"q must be [B, T, HQ, D], got shape {tuple(q.shape)}")
    if q.dtype not in DTYPES:
        raise ValueError(f"q has dtype {q.dtype}; these would do: {', '.join(map(str, DTYPES))}")
    if 0 in q.shape:
        raise ValueError(
            f"q has shape {tuple(q.shape)}: needs at least one sequence and one token, head and "
            "dimension"
        )
    scoring = "slc" in branches and blocks is None
    needs_k = [b for b in BRANCHES if b in branches or (b == "cmp" and scoring)]
    k = by_branch("k", k, needs_k)
    v = by_branch("v", v, branches)
    _one_length("k", k, q)
    _one_length("v", v, q)
    kv_heads, of_v = heads_of("k", k, q, q.shape[3]), heads_of("v", v, q, None)
    if of_v != kv_heads:
        raise ValueError(f"k has {kv_heads} KV heads and v has {of_v}; they must be the same")
    if q.shape[2] % kv_heads:
        below = q.shape[2] // kv_heads * kv_heads
        nearest = f"{below} and {below + kv_heads}" if below else f"{kv_heads}"
        raise ValueError(
            f"HQ={q.shape[2]} query heads are not a multiple of HKV={kv_heads}; "
            f"nearest that are: {nearest}"
        )
    wanted = (*q.shape[:3], 3)
    check_tensor(
        "gates",
        gates,
        f"[B, T, HQ, 3] = {wanted}; torch.full((*q.shape[:3], 3), 1 / 3) of q's dtype and device "
        "weighs the branches alike, and nsa.NSAAttention learns its gates",
    )
    if gates.shape != wanted:
        raise ValueError(f"gates must be [B, T, HQ, 3] = {wanted}, got {tuple(gates.shape)}")
    if not gates.is_floating_point():
        raise ValueError(f"gates must be floating point, got {gates.dtype}")
    check_device("gates", gates, q)
    phi = phi or Phi()
    if "cmp" in k:
        of_values = v["cmp"].shape[3] if "cmp" in v else None
        check_phi(phi, q, kv_heads, of_values, config, q.shape[1])
    if blocks is not None:
        _blocks(blocks, q, kv_heads)
    bounds = () if cu_seqlens is None else sequence_bounds(cu_seqlens, q)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} must be finite; None stands for D ** -0.5")
    given = q, k, v, gates, config, phi, branches, scale, blocks, cu_seqlens
    return Inputs(*given, checked_sinks(sinks, q), return_lse, bounds)


def checked_sinks(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """sinks [HQ] or [HQ, 3] as [HQ, 3] in the dtype of scores, or a ValueError; None stays None."""
    if sinks is None:
        return None
    heads = q.shape[2]
    check_tensor("sinks", sinks, f"[HQ] = ({heads},) or [HQ, 3]")
    if sinks.shape not in ((heads,), (heads, 3)) or not sinks.is_floating_point():
        raise ValueError(
            f"sinks must be [HQ] = ({heads},) or [HQ, 3] = ({heads}, 3) in floating point, got "
            f"{tuple(sinks.shape)} of {sinks.dtype}"
        )
    check_device("sinks", sinks, q)
    return (sinks if sinks.ndim == 2 else sinks[:, None].expand(heads, 3)).to(wide(q.dtype))


def check_blocks(inputs: Inputs) -> None:
    """Check a caller's selection in strict mode: in range, ascending, no duplicates. Syncs."""
    blocks = inputs.blocks
    count = count_selectable(inputs.q.shape[1], inputs.config)
    lowest, highest = int(blocks.min()), int(blocks.max())
    if highest >= count or lowest < -1:
        raise ValueError(
            f"blocks holds indices from {lowest} to {highest}; "
            f"legal are 0..{count - 1}, and -1 for an empty slot"
        )
    ranks = torch.where(blocks < 0, count, blocks)
    step = ranks.diff(dim=-1)
    if bool(((step < 0) | ((step == 0) & (ranks[..., 1:] < count))).any()):
        raise ValueError("blocks must be ascending without duplicates, with the empty slots last")


def check_tensor(name: str, x: object, wanted: str) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__} and must be a tensor {wanted}")


def _one_length(name: str, tensors: Mapping[str, Tensor], q: Tensor) -> None:
    """Check that q and `tensors` have equal T, since a query's position is its index."""
    x = next(iter(tensors.values()))
    if x.ndim != 4 or (queries := q.shape[1]) == (keys := x.shape[1]):
        return
    got = f"q has T={queries} and {name} has T={keys}"
    if q.shape[2] == x.shape[2]:  # the apparent heads are equal, and T is not
        shapes = f"q {tuple(q.shape)}, {name} {tuple(x.shape)}"
        raise ValueError(
            f"{got}: {shapes} are [B, T, H, D] only if the heads stand third; from torch's "
            "[B, H, T, D] transpose(1, 2) makes them so"
        )
    raise ValueError(
        f"{got}: query t stands at key t, so that all three have one T, and there is no cache of "
        f"keys, which nsa_decode takes; for the newest queries alone give all "
        f"{max(queries, keys)} and keep the last of o"
    )


def by_branch(name, x, needed) -> dict[str, Tensor]:
    if isinstance(x, Tensor):
        return dict.fromkeys(needed, x)
    if not isinstance(x, Mapping):
        check_tensor(name, x, "or a mapping with one for each of cmp, slc, win")
    missing = [b for b in needed if b not in x]
    if missing:
        raise ValueError(f"{name} has no entry for {', '.join(missing)}; it has {sorted(x)}")
    return {b: x[b] for b in needed}


def heads_of(name: str, tensors: Mapping[str, Tensor], q: Tensor, dim: int | None) -> int:
    """Number of KV heads; checked, with dtypes and dims, to be the same in every branch."""
    first = next(iter(tensors.values()))
    heads = first.shape[2] if first.ndim == 4 else "HKV"
    wanted = (*q.shape[:2], heads, dim or first.shape[-1])
    for branch, x in tensors.items():
        if tuple(x.shape) != wanted or 0 in x.shape:
            raise ValueError(
                f"{name}[{branch!r}] has shape {tuple(x.shape)}, wanted {wanted} "
                f"to go with q of shape {tuple(q.shape)}"
            )
        if x.dtype != q.dtype:
            raise ValueError(f"{name}[{branch!r}] is {x.dtype} and q is {q.dtype}; make them equal")
        check_device(f"{name}[{branch!r}]", x, q)
    return heads


def check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and q on {q.device}; put them on one device")


def _blocks(blocks: Tensor, q: Tensor, kv_heads: int) -> None:
    wanted = (*q.shape[:2], kv_heads)
    if blocks.ndim != 4 or blocks.shape[:3] != wanted or blocks.shape[3] < 1:
        raise ValueError(f"blocks must be {wanted} + (N,), got {tuple(blocks.shape)}")
    if blocks.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"blocks must be int32 or int64, got {blocks.dtype}")
    check_device("blocks", blocks, q)


def sequence_bounds(cu_seqlens: Tensor, q: Tensor) -> tuple[int, ...]:
    """cu_seqlens on the host, checked against q's T; () where a sync is not allowed."""
    if q.shape[0] != 1:
        raise ValueError(f"packed sequences need B=1, got B={q.shape[0]}: lay them end to end")
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"cu_seqlens must be an int32 tensor, got a {type(cu_seqlens).__name__}")
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens must be one-dimensional int32 or int64, got {cu_seqlens.dtype} of shape "
            f"{tuple(cu_seqlens.shape)}"
        )
    if torch.compiler.is_compiling() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return ()  # the values are on the GPU, and neither may sync
    if cu_seqlens.is_meta:
        return (0, q.shape[1])  # any bounds give the same shapes
    if is_batchedtensor(cu_seqlens):
        raise ValueError("cu_seqlens is vmapped and cannot be; give one for all calls")
    bounds = cu_seqlens.tolist()
    rising = all(a <= b for a, b in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != q.shape[1] or not rising:
        raise ValueError(
            f"cu_seqlens={bounds} must rise from 0 to T={q.shape[1]}, "
            "one entry more than there are sequences"
        )
    return tuple(bounds)


def check_phi(
    phi: Phi, q: Tensor, kv_heads: int, value_dim: int | None, config: NSAConfig, tokens: int
) -> None:
    """Check shapes, dtypes and devices of phi's tensors; a wrong one could broadcast silently.

    value_dim: None if no values are compressed. tokens: maximum length of a sequence.
    """
    length, dim = config.compress_block, q.shape[3]
    for side, weights, size in (("key", phi.key, dim), ("value", phi.value, value_dim)):
        if phi.kind == "mean" or size is None:
            continue
        hidden = weights.weight1.shape[-1] if phi.kind == "mlp" else size
        wanted = {"position": (length, size), "weight1": (length * size, hidden)}
        if phi.kind == "mlp":
            wanted |= {"bias1": (hidden,), "weight2": (hidden, size), "bias2": (size,)}
        for name, per_head in wanted.items():
            x, shape = getattr(weights, name), (kv_heads, *per_head)
            if x is None or tuple(x.shape) != shape:
                got = None if x is None else tuple(x.shape)
                raise ValueError(f"phi.{side}.{name} must be {shape} for {phi.kind}, got {got}")
            if x.dtype != q.dtype:
                raise ValueError(f"phi.{side}.{name} is {x.dtype} and q is {q.dtype}")
            check_device(f"phi.{side}.{name}", x, q)
    for table in phi.rotary or ():
        last = max(0, count_compressed(tokens, config) - 1) * config.compress_stride
        if table.ndim != 2 or table.shape[0] <= last or table.shape[1] != dim // 2:
            raise ValueError(
                f"phi.rotary needs tables of at least {last + 1} positions x {dim // 2}, "
                f"got {tuple(table.shape)}"
            )
        check_device("phi.rotary", table, q)
