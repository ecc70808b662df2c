"""Input tensors for attention benchmarks, and the overlap of neighbouring queries' selections."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from nsa.attention.branches import pool
from nsa.blocks import count_selectable
from nsa.config import NSAConfig
from nsa.reference.attend import attention_probs
from nsa.reference.nsa import BRANCHES, compressed_visible
from nsa.reference.select import select
from workbook.lab.measure.shapes import CAPTURED, Shape

COEFFICIENT = 0.98  # AR(1), "correlated": neighbours share most blocks, as in trained models
RUN = 64  # tokens of one coefficient, "captured"
CHUNK = 256  # tokens of an AR(1) process per matrix product
ELEMENTS = 1 << 24  # slots or scores held at once


@dataclass(frozen=True)
class Drawn:
    """Inputs of one call, as autograd leaves, and dO; k and v are shared or one per branch."""

    shape: Shape
    q: Tensor  # [B, T, HQ, D]
    k: Tensor | Mapping[str, Tensor]  # [B, T, HKV, D]
    v: Tensor | Mapping[str, Tensor]  # [B, T, HKV, DV]
    gates: Tensor  # [B, T, HQ, 3]
    do: Tensor  # [B, T, HQ, DV]

    def leaves(self) -> dict[str, Tensor]:
        """Return all inputs by name: q, k or k_cmp and so on, v likewise, gates."""
        found = {"q": self.q}
        for name, x in (("k", self.k), ("v", self.v)):
            found |= {name: x} if isinstance(x, Tensor) else {f"{name}_{b}": x[b] for b in x}
        return found | {"gates": self.gates}

    def fresh(self, how: Callable[[Tensor], Tensor] = lambda x: x) -> "Drawn":
        """Return new leaves, part of no graph yet: over the same memory, or what `how` returns.

        A leaf's AccumulateGrad node belongs to the stream of the first forward that used the leaf,
        and a backward under capture must not wait for another stream.
        """

        def again(x: Tensor) -> Tensor:
            return how(x.detach()).requires_grad_(x.requires_grad)

        return Drawn(**tree_map_only(Tensor, again, vars(self)))

    def fingerprint(self) -> list[Tensor]:
        """Sums of every tensor's bits over features and over tokens: equal if no tensor changed."""
        found = []
        for x in (*self.leaves().values(), self.do):
            bits = x.detach().view(torch.int16 if x.element_size() == 2 else torch.int32)
            found += [bits.sum((2, 3)), bits.sum(1)]
        return found

    def by_branch(self, name: str) -> dict[str, Tensor]:
        """Return k or v as a mapping by branch, even if shared."""
        x = getattr(self, name)
        return dict.fromkeys(BRANCHES, x) if isinstance(x, Tensor) else dict(x)


def draw(shape: Shape, device: str | torch.device = "cpu") -> Drawn:
    """Draw inputs of unit variance, gates uniform in 0..1; deterministic for a shape and device.

    Queries are white ("random"), an AR(1) process over tokens with COEFFICIENT ("correlated"), or
    one fitted to trained models ("captured"); keys, values and dO are white.
    """
    generator = torch.Generator(device).manual_seed(shape.seed)
    rows, dtype = (shape.batch, shape.tokens), shape.torch_dtype
    options = {"generator": generator, "device": device, "dtype": dtype}

    def normal(heads: int, dim: int) -> Tensor:
        return torch.randn((*rows, heads, dim), **options)

    def keys_or_values(dim: int) -> Tensor | dict[str, Tensor]:
        if shape.shared_kv:
            return normal(shape.kv_heads, dim).requires_grad_()
        return {b: normal(shape.kv_heads, dim).requires_grad_() for b in BRANCHES}

    if shape.queries == "random":
        q = normal(shape.heads, shape.dim)
    elif shape.queries == "captured":
        size = (*rows, shape.kv_heads, shape.group * shape.dim)
        q = switching(size, table_for(shape.tokens), generator, dtype)
        q = q.unflatten(3, (shape.group, -1)).flatten(2, 3)
    else:
        size = (*rows, shape.heads * shape.dim)
        q = autoregressive(size, COEFFICIENT, generator, dtype).unflatten(2, (shape.heads, -1))
    k, v = keys_or_values(shape.dim), keys_or_values(shape.value_dim)
    gates = torch.rand((*rows, shape.heads, 3), **options)
    do = normal(shape.heads, shape.value_dim)
    return Drawn(shape, q.requires_grad_(), k, v, gates.requires_grad_(), do)


def autoregressive(
    size: tuple[int, int, int],
    coefficient: float,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw [B, T, F]: x[t] = a x[t-1] + sqrt(1 - a^2) e[t], stationary from t = 0, variance 1.

    Computed CHUNK tokens at a time by one product with the process's response, in fp32.
    """
    batch, tokens, features = size
    device = generator.device
    step = torch.arange(CHUNK + 1, device=device, dtype=torch.float32)
    lag = (step[1:, None] - step[None, 1:]).clamp(min=0)
    response = torch.tril(coefficient**lag) * (1 - coefficient**2) ** 0.5
    decay = coefficient ** step[1:, None]
    x = torch.empty(size, dtype=dtype, device=device)
    last = torch.randn((batch, 1, features), generator=generator, device=device)
    for start in range(0, tokens, CHUNK):
        rows = min(CHUNK, tokens - start)
        noise = torch.randn((batch, rows, features), generator=generator, device=device)
        made = response[:rows, :rows] @ noise + decay[:rows] * last
        x[:, start : start + rows] = made
        last = made[:, -1:]
    return x


def switching(
    size: tuple[int, int, int, int], table: Sequence[float], random: torch.Generator, dtype
) -> Tensor:
    """Draw [B, T, HKV, F]: x[t] = a x[t-1] + sqrt(1 - a^2) e[t] with variance 1, where each RUN of
    tokens and head draws its `a` from the table."""
    batch, tokens, heads, features = size
    device = random.device
    given = torch.tensor(table, device=device, dtype=torch.float32)
    step = torch.arange(RUN + 1, device=device)
    lag = (step[1:, None] - step[None, 1:]).clamp(min=0)
    x = torch.empty(size, dtype=dtype, device=device)
    last = torch.randn((batch, heads, 1, features), generator=random, device=device)
    for start in range(0, tokens, RUN):
        a = given[torch.randint(len(given), (heads, 1, 1), generator=random, device=device)]
        response = torch.tril(a**lag) * (1 - a * a).clamp(min=0).sqrt()
        noise = torch.randn((batch, heads, RUN, features), generator=random, device=device)
        made = response @ noise + a ** step[1:, None] * last
        x[:, start : start + RUN] = made[:, :, : tokens - start].transpose(1, 2)
        last = made[:, :, -1:]
    return x


def table_for(tokens: int, file: Path = CAPTURED) -> list[float]:
    """The stored coefficients of the length nearest to `tokens`, by ratio."""
    stored = json.loads(file.read_text(encoding="utf-8"))["lengths"]
    nearest = min(stored, key=lambda n: abs(math.log(int(n) / tokens)))
    return stored[nearest]["coefficients"]


def mean_union(blocks: Tensor, neighbours: int) -> float:
    """Mean number of distinct blocks selected by `neighbours` consecutive tokens together.

    blocks [B, T, HKV, n], -1 for an empty slot; an incomplete tile at the end of T is ignored.
    ValueError if T has no complete tile.
    """
    batch, tokens, kv_heads, slots = blocks.shape
    tiles = tokens // neighbours
    if tiles == 0:
        raise ValueError(f"{tokens} tokens hold no tile of {neighbours} neighbours")
    total = torch.zeros((), dtype=torch.int64, device=blocks.device)
    step = max(1, ELEMENTS // (batch * kv_heads * slots * neighbours))
    for first in range(0, tiles, step):
        rows = blocks[:, first * neighbours : min(first + step, tiles) * neighbours]
        tile = rows.unflatten(1, (-1, neighbours)).transpose(2, 3).flatten(3)  # [B, tiles, HKV, *]
        tile = tile.sort(dim=-1).values
        # each increase is a new block; if no slot is empty, the first block adds one
        total += (tile.diff(dim=-1) > 0).sum() + (tile[..., 0] >= 0).sum()
    return float(total) / (batch * kv_heads * tiles)


def importance_at(q_rows: Tensor, k_cmp: Tensor, rows: Tensor, tokens: int, config: NSAConfig):
    """Return [B, R, HKV, NB]: Eq. 9 for queries q_rows [B, R, HQ, D] at positions rows [R].

    Computed by plain torch in the dtype of the inputs, at least fp32; a bounded number of scores
    is held at once.
    """
    count = count_selectable(tokens, config)
    step = max(1, ELEMENTS // max(1, q_rows.shape[0] * q_rows.shape[2] * k_cmp.shape[1]))
    parts = []
    for chunk in range(0, len(rows), step):
        at = slice(chunk, chunk + step)
        visible = compressed_visible(rows[at], k_cmp.shape[1], config)
        p_cmp, _ = attention_probs(q_rows[:, at], k_cmp, visible, q_rows.shape[3] ** -0.5)
        parts.append(pool(p_cmp.sum(2), count, config).transpose(1, 2))
    return torch.cat(parts, dim=1)


def select_at(importance: Tensor, rows: Tensor, config: NSAConfig) -> Tensor:
    """Compute Eq. 11 for importance [B, R, HKV, NB] of queries at ascending positions rows [R]."""
    breaks = (rows.diff() != 1).nonzero().flatten() + 1
    parts = [
        select(importance[:, first:last], config, first_position=int(rows[first]))
        for first, last in pairwise([0, *breaks.tolist(), len(rows)])
    ]
    return torch.cat(parts, dim=1)
