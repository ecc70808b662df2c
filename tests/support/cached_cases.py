"""Sequences that grow in a cache, and what the whole of them gives at once."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from cases import Case, Drawn, draw
from torch import Tensor

from nsa.attention.cache import LayerCache
from nsa.attention.decode import nsa_decode
from nsa.attention.places import CacheShape
from nsa.config import NSAConfig
from nsa.reference.nsa import BRANCHES, nsa


@dataclass(frozen=True)
class Growth:
    """Sequences of a case, as long each as `lengths` says, that grow by `chunks` tokens a call."""

    case: Case
    chunks: tuple[int, ...]
    lengths: tuple[int, ...]  # [B]; a sequence that is at its end stays there
    page: int | None = None
    shared: bool = False  # of slc and win, in the cache
    branches: tuple[str, ...] = BRANCHES
    capacity: int = 0  # 0: what is needed

    def cache(self, dtype: torch.dtype, device: str = "cpu", **changes) -> LayerCache:
        case = self.case
        sizes = {"kv_heads": case.kv_heads, "dim": case.dim, "value_dim": case.value_dim}
        kept = {"branches": self.branches, "shared": self.shared, "page": self.page}
        shape = CacheShape(
            case.config, case.batch, self.capacity or case.tokens, dtype=dtype, **sizes, **kept
        )
        return LayerCache(replace(shape, **changes), device=device)


def contents(cache: LayerCache) -> dict[str, Tensor]:
    """All tensors of a cache by name, those of its places too."""
    return cache.tensors | cache.places.state()


@contextmanager
def unchanged(cache: LayerCache) -> Iterator[None]:
    """Assert that the tensors of a cache have the same bits afterwards."""
    before = {name: x.clone() for name, x in contents(cache).items()}
    yield
    for name, x in contents(cache).items():
        assert torch.equal(x, before[name]), name


def arguments(drawn: Drawn, growth: Growth, cache: LayerCache):
    """(q, k, v, gates, phi) with one tensor for slc and win where the cache shares it, and rotary
    tables that cover its capacity."""
    (q, k, v, gates, _), options = drawn.arguments()
    phi = options["phi"]
    if phi.rotary is not None:
        longer = draw(replace(growth.case, tokens=cache.shape.capacity), q.dtype, q.device)
        phi = replace(phi, rotary=longer.arguments()[1]["phi"].rotary)
    k, v = ({b: x.detach() for b, x in side.items()} for side in (k, v))
    if growth.shared:
        k, v = ({**x, "win": x["slc"]} for x in (k, v))
    return q.detach(), k, v, gates.detach(), phi


def begun(growth: Growth, dtype: torch.dtype = torch.float64, **changes):
    """(an empty cache, arguments of the case) of a growth."""
    cache = growth.cache(dtype, **changes)
    return cache, arguments(draw(growth.case, dtype), growth, cache)


def whole(q, k, v, gates, phi, growth: Growth, **options) -> Tensor:
    """o [B, T, HQ, DV] of the reference over the whole sequences; 0 behind a sequence's end."""
    options |= {"phi": phi, "branches": growth.branches}
    o = nsa(q, k, v, gates, growth.case.config, **options).o.detach()
    for b, length in enumerate(growth.lengths):
        o[b, length:] = 0
    return o


def grown(q, k, v, gates, phi, growth: Growth, cache: LayerCache, backend: str, **options):
    """o of the same, chunk by chunk; what is behind a sequence's end is NaN on the way in."""
    lengths = torch.tensor(growth.lengths)
    parts, start = [], 0
    for chunk in growth.chunks:
        rows = slice(start, start + chunk)
        counts = (lengths - start).clamp(0, chunk).int().to(q.device)
        ragged = bool((counts < chunk).any())
        behind = (torch.arange(chunk) >= counts.cpu()[:, None]).to(q.device)[..., None, None]
        new_k, new_v = cut(k, rows, behind), cut(v, rows, behind)
        new = [x[:, rows].masked_fill(behind, torch.nan) for x in (q, gates)]
        parts.append(
            nsa_decode(
                new[0], new_k, new_v, new[1], cache, phi=phi, backend=backend,
                counts=counts if ragged else None, **options,
            )
        )  # fmt: skip
        start += chunk
    return torch.cat(parts, 1)


def cut(side: dict[str, Tensor], rows: slice, behind: Tensor) -> dict[str, Tensor]:
    """These rows of a branch's keys or values; what is one tensor stays one."""
    made = {id(x): x[:, rows].masked_fill(behind, torch.nan) for x in side.values()}
    return {branch: made[id(x)] for branch, x in side.items()}


def random_growth(seed: int) -> Growth:
    """One of very many: sizes, phi, heads, lengths, chunks and pages, small enough for loops."""
    r = random.Random(seed)
    stride = r.choice((1, 2, 3, 4))
    length = stride * r.randint(1, 3)
    block = stride * r.randint(length // stride, 5)
    initial, local = r.randint(0, 2), r.randint(1, 2)
    config = NSAConfig(
        length, stride, block, initial + local + r.randint(0, 3), initial, local,
        window=r.choice((1, 2, 5, 9, 40)),
    )  # fmt: skip
    tokens = r.choice((1, 3, 17, 33, 60))
    batch = r.choice((1, 1, 2, 3))
    dims = r.choice(((4, 4), (6, 2), (8, 8)))
    shared, phi = r.random() < 0.3, r.choice(("mean", "linear", "mlp"))
    case = Case(
        tokens, r.choice((1, 2)), r.choice((1, 2, 3)), *dims, batch, config, phi,
        shared=shared, compress_rope=r.random() < 0.3,
    )  # fmt: skip
    lengths = tuple(r.choice((tokens, r.randint(0, tokens))) for _ in range(batch))
    widest = r.choice((1, 2, 16, 25, 60))
    chunks, left = [], tokens
    while left:
        chunks.append(min(left, r.randint(1, widest)))
        left -= chunks[-1]
    page = r.choice((None, block, 3 * block))
    subsets = (BRANCHES, BRANCHES, ("cmp",), ("slc",), ("win",), ("slc", "win"), ("cmp", "slc"))
    return Growth(case, tuple(chunks), lengths, page, shared, r.choice(subsets))
