"""Caches for the decode kernels' tests, drawn whole, and a step's definition on what one holds.

What a cache does not hold is NaN, so that a read of it shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nsa.attention.cache import NAMES
from nsa.attention.places import CacheShape
from nsa.blocks import count_compressed, count_selectable, overlap
from nsa.config import NSAConfig
from nsa.reference.attend import attend, attention_probs
from nsa.reference.compress import Phi, PhiWeights, compress_keys, compress_values
from nsa.reference.nsa import BRANCHES, compressed_visible, nsa
from nsa.reference.rotary import rotary_tables
from nsa.reference.select import select, selected_tokens


@dataclass(frozen=True)
class Step:
    """One step: what sequences hold, what comes on top, and how the cache is laid out."""

    lengths: tuple[int, ...]
    config: NSAConfig
    new: int = 1
    counts: tuple[int, ...] | None = None
    kv_heads: int = 1
    group: int = 2
    dim: int = 16
    value_dim: int = 16
    phi: str = "mean"
    rotary: bool = False
    page: int | None = None  # None: one page a sequence
    shared: bool = False
    branches: tuple[str, ...] = BRANCHES
    dtype: torch.dtype = torch.float32
    capacity: int = 0  # at least what it takes
    seed: int = 0

    @property
    def added(self) -> tuple[int, ...]:
        return self.counts or (self.new,) * len(self.lengths)


@dataclass
class Cache:
    """A step's inputs, and the cache's tensors as `nsa.kernels.decode.decode` takes them."""

    step: Step
    k: dict[str, Tensor]  # each [B, T, HKV, D]: all tokens, those of the step included
    v: dict[str, Tensor]
    q: Tensor
    gates: Tensor
    phi: Phi
    shape: CacheShape
    tensors: dict[str, Tensor | None] = field(default_factory=dict)

    def new(self, x: Tensor) -> Tensor:
        """The step's rows of x [B, T, ...]; NaN where a sequence has fewer."""
        out = torch.full((x.shape[0], self.step.new, *x.shape[2:]), float("nan"), dtype=x.dtype)
        for b, (held, added) in enumerate(zip(self.step.lengths, self.step.added, strict=True)):
            out[b, :added] = x[b, held : held + added].cpu()
        return out.to(x.device)

    def arguments(self) -> tuple[tuple, dict]:
        """(args, kwargs) of the kernels' launcher."""
        step, phi = self.step, self.phi
        fresh = [{b: self.new(x[b]) for b in BRANCHES} for x in (self.k, self.v)]
        learned = {} if step.phi == "mean" else {"phi_key": phi.key, "phi_value": phi.value}
        counts = step.counts and torch.tensor(step.counts, dtype=torch.int32, device=self.q.device)
        options = {"config": step.config, "phi": step.phi, "rotary": phi.rotary, "counts": counts}
        options |= learned | {"branches": step.branches}
        return (self.q, *fresh, self.gates), self.tensors | options


def draw(step: Step, device: str = "cpu") -> Cache:
    """A cache that holds step.lengths, of standard normal rows."""
    random = torch.Generator().manual_seed(step.seed)
    tokens = max(a + b for a, b in zip(step.lengths, step.added, strict=True))
    batch, heads = len(step.lengths), step.kv_heads * step.group

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(*shape, dtype=torch.float64, generator=random) * scale
        return x.to(device, step.dtype)

    def rows(width: int) -> dict[str, Tensor]:
        if step.shared:
            return dict.fromkeys(BRANCHES, normal(batch, tokens, step.kv_heads, width))
        return {b: normal(batch, tokens, step.kv_heads, width) for b in BRANCHES}

    def weights(width: int) -> PhiWeights | None:
        if step.phi == "mean":
            return None
        length, hidden = step.config.compress_block, width if step.phi == "linear" else 40
        fan_in, shapes = length * width, [(length, width), (length * width, hidden)]
        if step.phi == "mlp":
            shapes += [(hidden,), (hidden, width), (width,)]
        scales = [0.5, fan_in**-0.5, 0.5, hidden**-0.5, 0.5]
        pairs = zip(shapes, scales, strict=False)
        return PhiWeights(*(normal(step.kv_heads, *shape, scale=s) for shape, s in pairs))

    k, v = rows(step.dim), rows(step.value_dim)
    shape = CacheShape(
        step.config, batch, max(tokens, step.capacity, 1), step.kv_heads, step.dim,
        step.value_dim, step.dtype, step.branches, step.shared, page=step.page,
    )  # fmt: skip
    shape = replace(shape, pages=step.page and shape.pool + 3)
    tables = rotary_tables(shape.capacity, step.dim, device=device) if step.rotary else None
    phi = Phi(step.phi, weights(step.dim), weights(step.value_dim), tables)
    q = normal(batch, step.new, heads, step.dim)
    gates = torch.rand(batch, step.new, heads, 3, dtype=torch.float64, generator=random)
    cache = Cache(step, k, v, q, gates.to(device, step.dtype), phi, shape)
    order = torch.randperm(shape.pool, generator=random) if step.page else torch.arange(batch)
    table = order[: batch * shape.pages_each].view(batch, -1).to(device, torch.int32)
    cache.tensors = filled(cache, step.lengths, table)
    return cache


def filled(cache: Cache, lengths: Sequence[int], table: Tensor) -> dict[str, Tensor | None]:
    """The cache's tensors when the sequences hold `lengths`, by that page table."""
    step, shape, device = cache.step, cache.shape, cache.q.device
    page, stride = shape.page_size, step.config.compress_stride
    tensors: dict[str, Tensor | None] = dict.fromkeys(NAMES)
    for name, size in shape.tensors().items():
        tensors[name] = into = torch.full(size, torch.nan, dtype=step.dtype, device=device)
        x, kind = cache.k if name[0] == "k" else cache.v, name[2:]
        for b, held in enumerate(lengths):
            where, t = table[b].long(), torch.arange(held, device=device)
            if kind == "slc":
                into[where[t // page], t % page] = x["slc"][b, :held]
            elif kind == "cmp":
                make = compress_keys if name[0] == "k" else compress_values
                own = x["cmp"][b : b + 1, :held].double()
                rows = make(own, wide_phi(cache.phi), step.config)[0]
                start = torch.arange(len(rows), device=device) * stride
                into[where[start // page], start % page // stride] = rows.to(step.dtype)
            else:
                late = t[max(0, held - into.shape[1]) :]
                into[b, late % into.shape[1]] = x["cmp" if kind == "raw" else "win"][b, late]
    held = torch.tensor(lengths, dtype=torch.int32, device=device)
    return tensors | {"table": table, "lengths": held}


def wide_phi(phi: Phi) -> Phi:
    """phi in fp64."""

    def wide(x):
        if x is None:
            return None
        return PhiWeights(**{n: None if t is None else t.double() for n, t in vars(x).items()})

    rotary = phi.rotary and tuple(x.double() for x in phi.rotary)
    return replace(phi, key=wide(phi.key), value=wide(phi.value), rotary=rotary)


def after(cache: Cache) -> dict:
    """The tensors that a step must leave behind; NaN where nothing is known."""
    lengths = [a + b for a, b in zip(cache.step.lengths, cache.step.added, strict=True)]
    return filled(cache, lengths, cache.tensors["table"])


def whole(cache: Cache) -> Tensor:
    """o [B, N, HQ, DV] fp64: the last rows of the reference over all tokens; 0 past them."""
    step, out = cache.step, []
    for b, (held, added) in enumerate(zip(step.lengths, step.added, strict=True)):
        total = held + added
        q = torch.zeros(1, total, *cache.q.shape[2:], dtype=torch.float64, device=cache.q.device)
        gates = torch.zeros(1, total, *cache.gates.shape[2:], dtype=torch.float64, device=q.device)
        q[0, held:], gates[0, held:] = cache.q[b, :added].double(), cache.gates[b, :added].double()
        k, v = (
            {n: x[b : b + 1, :total].double() for n, x in y.items()} for y in (cache.k, cache.v)
        )
        o = torch.zeros(step.new, q.shape[2], step.value_dim, dtype=torch.float64, device=q.device)
        if added:
            found = nsa(
                q, k, v, gates, step.config, phi=wide_phi(cache.phi), branches=step.branches
            )
            o[:added] = found.o[0, held:]
        out.append(o)
    return torch.stack(out)


def blocks_of(q, k_cmp, held: int, total: int, config: NSAConfig, scale: float) -> Tensor:
    """The exact selection [1, N, HKV, n] of queries from position `held` on."""
    positions = torch.arange(held, total, device=q.device)
    visible = compressed_visible(positions, k_cmp.shape[1], config)
    p, _ = attention_probs(q.double(), k_cmp.double(), visible, scale)
    blocks = count_selectable(total, config)
    shared = [[overlap(i, j, config) for j in range(blocks)] for i in range(k_cmp.shape[1])]
    matrix = torch.tensor(shared, dtype=p.dtype, device=p.device).view(-1, blocks)
    return select(torch.einsum("bhgtc,cj->bthj", p, matrix), config, first_position=held)


def on_cache(cache: Cache, tensors: dict, dtype: torch.dtype) -> Tensor:
    """The definition in `dtype` on what `tensors`, a cache after the step, hold: [B, N, HQ, DV].

    Blocks are those of fp64.
    """
    step, config, out = cache.step, cache.step.config, []
    scale = step.dim**-0.5
    for b, (held, added) in enumerate(zip(step.lengths, step.added, strict=True)):
        total = held + added
        rows = {}
        table = tensors["table"][b].long()
        for side in "kv":
            slc, cmp, win = (tensors[f"{side}_{n}"] for n in ("slc", "cmp", "win"))
            t = torch.arange(total, device=cache.q.device)
            if slc is not None:
                rows[side, "slc"] = slc[table[t // slc.shape[1]], t % slc.shape[1]][None].to(dtype)
            if win is not None:
                x = win[b, t % win.shape[1]].to(dtype)
                x[: max(0, total - win.shape[1])] = 0.0
                rows[side, "win"] = x[None]
            elif slc is not None:
                rows[side, "win"] = rows[side, "slc"]
            if cmp is not None:
                i = torch.arange(count_compressed(total, config), device=t.device)
                x = cmp[table[i // cmp.shape[1]], i % cmp.shape[1]]
                rows[side, "cmp"] = x[None].to(dtype)
        o = torch.zeros(step.new, *cache.q.shape[2:3], step.value_dim, dtype=dtype, device=t.device)
        out.append(o)
        if not added:
            continue
        q = cache.q[b : b + 1, :added]
        positions = torch.arange(held, total, device=q.device)
        distance = positions[:, None] - torch.arange(total, device=q.device)
        for number, branch in enumerate(BRANCHES):
            if branch not in step.branches:
                continue
            if branch == "cmp":
                seen = compressed_visible(positions, rows["k", "cmp"].shape[1], config)
            elif branch == "slc":
                blocks = blocks_of(q, rows["k", "cmp"], held, total, config, scale)
                seen = selected_tokens(blocks, total, config) & (distance >= 0)
            else:
                seen = ((distance >= 0) & (distance < config.window))[None, None]
            found, _ = attend(q.to(dtype), rows["k", branch], rows["v", branch], seen, scale)
            o[:added] += cache.gates[b, :added, :, number, None].to(dtype) * found[0]
    return torch.stack(out)
