"""Positions of the queries among the keys: q_start and the bounds of packed sequences, checked."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from nsa.config import as_int


class Place(NamedTuple):
    """Rows of one packed sequence; it may have no queries."""

    rows: slice  # of q, gates and blocks
    keys: slice  # of k and v
    start: int  # position of the first of the rows in the sequence


def check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and q on {q.device}; put them on one device")


def placed(
    q: Tensor,
    keys: int,
    q_start: int | Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> tuple[int | Tensor, Tensor | None, tuple[Place, ...]]:
    """Return (q_start, cu_seqlens_q, places) of q [B, Tq, HQ, D] among `keys` tokens.

    q_start is an int without packed sequences, and for those 0 with cu_seqlens_q None if each query
    stands at the key of its row, else the position [N] int32 of each sequence's first query, with
    the bounds cu_seqlens_q [N + 1] of the queries. places is empty without packed sequences, and
    where their bounds cannot be read.

    Raises ValueError for positions outside the keys, with those that are inside.
    """
    rows = q.shape[1]
    if cu_seqlens is None:
        if cu_seqlens_q is not None:
            raise ValueError(
                "cu_seqlens_q has the bounds of packed queries and needs cu_seqlens, those of the "
                "keys; a batch of sequences takes one q_start for all"
            )
        return _start(q_start, rows, keys), None, ()
    bounds = sequence_bounds(cu_seqlens, q, keys)
    if cu_seqlens_q is None:
        start = _start(q_start, rows, keys)
        if rows == keys:
            return 0, None, _places(bounds, bounds, (0,) * (len(bounds) - 1))
        # The queries are rows start.. of the packed axis: each sequence has those inside it.
        cu_seqlens_q = (cu_seqlens - start).clamp(0, rows).int()
        starts = (start - cu_seqlens[:-1]).clamp(min=0).minimum(cu_seqlens.diff()).int()
        of_q = tuple(min(max(x - start, 0), rows) for x in bounds)
        first = tuple(min(max(start - a, 0), b - a) for a, b in pairwise(bounds))
        return starts, cu_seqlens_q, _places(bounds, of_q, first)
    of_q = sequence_bounds(cu_seqlens_q, q, rows, "cu_seqlens_q")
    check_device("cu_seqlens_q", cu_seqlens_q, cu_seqlens)
    if cu_seqlens_q.shape != cu_seqlens.shape:
        raise ValueError(
            f"cu_seqlens_q has {cu_seqlens_q.shape[0]} entries and cu_seqlens "
            f"{cu_seqlens.shape[0]}; they bound the same sequences"
        )
    starts = cu_seqlens.diff() - cu_seqlens_q.diff() if q_start is None else q_start
    if not isinstance(starts, Tensor) or starts.shape != (cu_seqlens.shape[0] - 1,):
        got = f"shape {tuple(starts.shape)}" if isinstance(starts, Tensor) else repr(starts)
        raise ValueError(
            f"q_start of queries with cu_seqlens_q must be an int32 tensor "
            f"[{cu_seqlens.shape[0] - 1}], a position for each sequence, got {got}; None makes "
            "them the newest tokens of each"
        )
    if starts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"q_start must be int32 or int64, got {starts.dtype}")
    check_device("q_start", starts, cu_seqlens)
    if not bounds or not of_q:
        return starts.int(), cu_seqlens_q.int(), ()
    first = (keys - rows,) if starts.is_meta else tuple(starts.tolist())
    for n, start in enumerate(first):
        has, new = bounds[n + 1] - bounds[n], of_q[n + 1] - of_q[n]
        if not 0 <= start <= has - new:
            raise ValueError(
                f"sequence {n} has {has} keys and its {new} queries would begin at {start}; "
                + (f"0 to {has - new} would do" if new <= has else "it needs a key for each query")
            )
    return starts.int(), cu_seqlens_q.int(), _places(bounds, of_q, first)


def _places(
    bounds: tuple[int, ...], of_q: tuple[int, ...], first: tuple[int, ...]
) -> tuple[Place, ...]:
    parts = zip(pairwise(of_q), pairwise(bounds), first, strict=True)
    return tuple(Place(slice(*a), slice(*b), at) for a, b, at in parts)


def _start(q_start: int | Tensor | None, rows: int, keys: int) -> int:
    """Position of the first query, one for all sequences."""
    if q_start is None:
        q_start = 0
    if isinstance(q_start, Tensor):
        raise ValueError(
            f"q_start is a tensor of shape {tuple(q_start.shape)}: one int is for all sequences of "
            "a batch; packed sequences with cu_seqlens_q have one each"
        )
    if not isinstance(q_start, torch.SymInt):
        q_start = as_int("q_start", q_start)
    if not 0 <= q_start <= keys - rows:
        inside = f"0 to {keys - rows} would do" if rows <= keys else "each query needs its key"
        raise ValueError(
            f"q_start={q_start} of {rows} queries is not inside the {keys} tokens of the keys; "
            f"{inside}"
        )
    return q_start


def sequence_bounds(
    cu_seqlens: Tensor, q: Tensor, tokens: int | None = None, name: str = "cu_seqlens"
) -> tuple[int, ...]:
    """cu_seqlens on the host, checked against `tokens`, q's T by default; () where a sync is not
    allowed."""
    tokens = q.shape[1] if tokens is None else tokens
    if q.shape[0] != 1:
        raise ValueError(f"packed sequences need B=1, got B={q.shape[0]}: lay them end to end")
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"{name} must be an int32 tensor, got a {type(cu_seqlens).__name__}")
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} must be one-dimensional int32 or int64, got {cu_seqlens.dtype} of shape "
            f"{tuple(cu_seqlens.shape)}"
        )
    if torch.compiler.is_compiling() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return ()  # the values are on the GPU, and neither may sync
    if cu_seqlens.is_meta:
        return (0, tokens)  # any bounds give the same shapes
    if is_batchedtensor(cu_seqlens):
        raise ValueError(f"{name} is vmapped and cannot be; give one for all calls")
    bounds = cu_seqlens.tolist()
    rising = all(a <= b for a, b in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or not rising:
        raise ValueError(
            f"{name}={bounds} must rise from 0 to T={tokens}, "
            "one entry more than there are sequences"
        )
    return tuple(bounds)
