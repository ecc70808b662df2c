"""Inputs of one attention call, checked once, so that no backend checks them again."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nsa.attention.placing import Place, check_device, placed
from nsa.attention.span import wide
from nsa.blocks import count_compressed, count_selectable
from nsa.config import NSAConfig, other_than
from nsa.reference.compress import Phi
from nsa.reference.nsa import BRANCHES

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Inputs:
    """The tensors and sizes of a call. k and v hold an entry for each branch that needs one.

    T queries stand among S tokens, from q_start on; S = T without an offset.
    """

    q: Tensor  # [B, T, HQ, D]
    k: Mapping[str, Tensor]  # each [B, S, HKV, D]
    v: Mapping[str, Tensor]  # each [B, S, HKV, DV]
    gates: Tensor  # [B, T, HQ, 3]
    config: NSAConfig
    phi: Phi
    branches: tuple[str, ...]
    scale: float
    blocks: Tensor | None = None  # [B, T, HKV, N] int32 or int64: a selection made by the caller
    cu_seqlens: Tensor | None = None  # [N + 1] int32 or int64, B = 1: bounds of the keys
    sinks: Tensor | None = None  # [HQ, 3] in fp32, or fp64 for fp64 inputs
    return_lse: bool = False
    q_start: int | Tensor = 0  # packed with cu_seqlens_q: [N] int32, one for each sequence
    cu_seqlens_q: Tensor | None = None  # [N + 1] int32: None if queries have the keys' bounds
    compressed: tuple[Tensor, Tensor | None] | None = None  # each [B, C, HKV, *], instead of phi's
    places: tuple[Place, ...] = ()  # packed sequences on the host; empty if they cannot be read
    return_blocks: bool = False

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
    def tokens(self) -> int:
        """Number of tokens that have keys, S; all sequences together if they are packed."""
        return next(iter(self.k.values())).shape[1]

    @property
    def offset(self) -> bool:
        """True if some query may stand elsewhere than at the key of its row."""
        return self.cu_seqlens_q is not None or self.q.shape[1] != self.tokens

    @property
    def needs_lse(self) -> bool:
        """True if the branches' log-sum-exps are returned or needed to apply sinks."""
        return self.return_lse or self.sinks is not None

    def sequences(self, idle: bool = False) -> Iterator["Inputs"]:
        """Each packed sequence as separate inputs, not packed; empty ones are left out, and those
        that have keys and no queries too unless `idle`."""
        if not self.places:
            raise ValueError(
                "this backend takes packed sequences one by one and needs their lengths on the "
                "host, which a CUDA graph or torch.compile cannot give; backend 'triton' does not"
            )
        plain, first = {"cu_seqlens": None, "cu_seqlens_q": None, "places": ()}, 0
        for rows, keys, start in self.places:
            of_cmp = slice(first, first + count_compressed(keys.stop - keys.start, self.config))
            first = of_cmp.stop
            if keys.start == keys.stop or (rows.start == rows.stop and not idle):
                continue
            k, v = ({b: x[:, keys] for b, x in side.items()} for side in (self.k, self.v))
            cut = {"q": self.q[:, rows], "k": k, "v": v, "gates": self.gates[:, rows]}
            cut["blocks"] = None if self.blocks is None else self.blocks[:, rows]
            if self.compressed is not None:
                cut["compressed"] = tuple(x if x is None else x[:, of_cmp] for x in self.compressed)
            yield replace(self, **cut, q_start=start, **plain)


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
    q_start: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    compressed: tuple[Tensor, Tensor | None] | None = None,
    return_blocks: bool = False,
) -> Inputs:
    """Return the inputs of a call; ValueError with the values received and accepted."""
    given = (branches,) if isinstance(branches, str) else tuple(branches)
    branches = tuple(b for b in BRANCHES if b in given)
    if not branches or not set(given) <= set(BRANCHES):
        raise ValueError(f"branches={given!r}; choose at least one of {BRANCHES}")
    if return_blocks and "slc" not in branches:
        raise ValueError(f"return_blocks: branches={given!r} select none; 'slc' does")
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
    k = by_branch("k", k, needs_k, compressed is not None)
    v = by_branch("v", v, branches, compressed is not None)
    own = q_start is None and cu_seqlens_q is None
    tokens = q.shape[1] if own else _tokens("k", k)
    if own:
        _one_length("k", k, q)
        _one_length("v", v, q)
    kv_heads, of_v = heads_of("k", k, q, q.shape[3], tokens), heads_of("v", v, q, None, tokens)
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
    if compressed is not None:
        compressed = _compressed(compressed, q, kv_heads, branches, next(iter(v.values())))
    elif "cmp" in k:
        of_values = v["cmp"].shape[3] if "cmp" in v else None
        check_phi(phi, q, kv_heads, of_values, config, tokens)
    if blocks is not None:
        _blocks(blocks, q, kv_heads)
    q_start, cu_seqlens_q, places = placed(q, tokens, q_start, cu_seqlens, cu_seqlens_q)
    if compressed is not None:
        _check_count(compressed[0].shape[1], tokens, cu_seqlens is not None, places, config)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} must be finite; None stands for D ** -0.5")
    given = q, k, v, gates, config, phi, branches, scale, blocks, cu_seqlens
    placing = q_start, cu_seqlens_q, compressed, places, return_blocks
    return Inputs(*given, checked_sinks(sinks, q), return_lse, *placing)


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
    count = count_selectable(inputs.tokens, inputs.config)
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


def check_sized(name: str, x: Any, wanted: str, shape: tuple, *dtypes: torch.dtype) -> None:
    """Raise ValueError unless x is a tensor of that shape and of one of these dtypes."""
    check_tensor(name, x, wanted)
    if tuple(x.shape) != shape or x.dtype not in dtypes:
        raise ValueError(f"{name} must be {wanted}, got {tuple(x.shape)} of {x.dtype}")


def check_counts(counts: Any, batch: int) -> None:
    """Raise ValueError unless these can be the numbers of real rows of `batch` sequences."""
    check_sized("counts", counts, f"int32 [B] = ({batch},)", (batch,), torch.int32, torch.int64)


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
    newest = f"q_start={keys - queries} makes the queries the newest tokens, and "
    raise ValueError(
        f"{got}: without q_start query t stands at key t, so that all three have one T; "
        f"{newest if queries < keys else ''}a cache of keys is nsa_decode's"
    )


def _tokens(name: str, tensors: Mapping[str, Tensor]) -> int:
    """Number of tokens of the first tensor."""
    branch, x = next(iter(tensors.items()))
    if x.ndim != 4:
        raise ValueError(f"{name}[{branch!r}] must be [B, S, HKV, *], got shape {tuple(x.shape)}")
    return x.shape[1]


def _compressed(
    given: object, q: Tensor, kv_heads: int, branches: Sequence[str], v: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Check compressed keys and values made by the caller, all but their number."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ValueError(
            "compressed must be a pair (keys [B, C, HKV, D], values [B, C, HKV, DV]), got a "
            f"{type(given).__name__}"
        )
    for name, x, dim in zip(("keys", "values"), given, (q.shape[3], v.shape[3]), strict=True):
        if x is None and name == "values" and "cmp" not in branches:
            continue
        check_tensor(f"compressed {name}", x, "[B, C, HKV, D or DV]")
        wanted = q.shape[0], given[0].shape[1], kv_heads, dim
        if tuple(x.shape) != wanted or x.dtype != q.dtype:
            raise ValueError(
                f"compressed {name} must be {wanted} in {q.dtype}, got {tuple(x.shape)} in "
                f"{x.dtype}"
            )
        check_device(f"compressed {name}", x, q)
    return given[0], given[1] if "cmp" in branches else None


def _check_count(
    count: int, tokens: int, packed: bool, places: Sequence[Place], config: NSAConfig
) -> None:
    """Check the number of compressed keys, where it is known."""
    if packed and not places:
        return
    lengths = [p.keys.stop - p.keys.start for p in places] if packed else [tokens]
    wanted = sum(count_compressed(length, config) for length in lengths)
    if count != wanted:
        raise ValueError(
            f"compressed has {count} keys, and {tokens} tokens have {wanted}"
            + (", sequence after sequence" if packed else "")
        )


def by_branch(name, x, needed, but_cmp: bool = False) -> dict[str, Tensor]:
    """An entry for each branch that needs one; but_cmp: cmp is not read, and may lack its own."""
    if isinstance(x, Tensor):
        return dict.fromkeys(needed, x)
    if not isinstance(x, Mapping):
        check_tensor(name, x, "or a mapping with one for each of cmp, slc, win")
    if but_cmp and "cmp" in needed and "cmp" not in x and x:
        x = {**x, "cmp": next(iter(x.values()))}
    missing = [b for b in needed if b not in x]
    if missing:
        raise ValueError(f"{name} has no entry for {', '.join(missing)}; it has {sorted(x)}")
    return {b: x[b] for b in needed}


def heads_of(
    name: str, tensors: Mapping[str, Tensor], q: Tensor, dim: int | None, tokens: int
) -> int:
    """Number of KV heads; checked, with dtypes and dims, to be the same in every branch."""
    first = next(iter(tensors.values()))
    heads = first.shape[2] if first.ndim == 4 else "HKV"
    wanted = (q.shape[0], tokens, heads, dim or first.shape[-1])
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


def _blocks(blocks: Tensor, q: Tensor, kv_heads: int) -> None:
    wanted = (*q.shape[:2], kv_heads)
    if blocks.ndim != 4 or blocks.shape[:3] != wanted or blocks.shape[3] < 1:
        raise ValueError(f"blocks must be {wanted} + (N,), got {tuple(blocks.shape)}")
    if blocks.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"blocks must be int32 or int64, got {blocks.dtype}")
    check_device("blocks", blocks, q)


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
