"""A filled cache and a new token, the step's expected result, and the keys it may read."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.attention.branches import pool
from nsa.attention.cache import LayerCache
from nsa.blocks import count_compressed, count_selectable
from nsa.reference.attend import attend, attention_probs
from nsa.reference.nsa import BRANCHES, combine
from nsa.reference.select import select
from workbook.lab.measure import accuracy
from workbook.lab.measure.accuracy import AccuracyError
from workbook.rooms.decode.cells import Cell

CHUNK = 1 << 16  # tokens of all sequences drawn and appended at once
SAMPLE = 4  # sequences compared with fp64
CLEAR = 1e-4  # fraction of its importance by which a block must lead the next, with fp32 sums


@dataclass(frozen=True)
class New:
    """New token of each sequence: q [B, 1, HQ, D], k and v [B, 1, HKV, D] by branch, gates."""

    q: Tensor
    k: dict[str, Tensor]
    v: dict[str, Tensor]
    gates: Tensor  # [B, 1, HQ, 3]


def draw(cell: Cell, tokens: int, generator: torch.Generator) -> tuple[dict, dict]:
    """Draw keys and values [B, tokens, HKV, D] by branch, of unit variance."""
    size = (cell.batch, tokens, cell.kv_heads, cell.dim)
    options = {"generator": generator, "device": generator.device, "dtype": cell.torch_dtype}

    def side() -> dict[str, Tensor]:
        if cell.shared_kv:
            return dict.fromkeys(BRANCHES, torch.randn(size, **options))
        return {branch: torch.randn(size, **options) for branch in BRANCHES}

    return side(), side()


def new_token(cell: Cell, device: torch.device) -> New:
    generator = torch.Generator(device).manual_seed(cell.seed)
    options = {"generator": generator, "device": device, "dtype": cell.torch_dtype}
    k, v = draw(cell, 1, generator)
    q = torch.randn((cell.batch, 1, cell.heads, cell.dim), **options)
    return New(q, k, v, torch.rand((cell.batch, 1, cell.heads, 3), **options))


def filled(cell: Cell, page: int | None, device: torch.device, seed: int) -> LayerCache:
    """Return a cache of all tokens except the new one; its pages are in random order."""
    cache = LayerCache(cell.shape(page), device=device)
    generator = torch.Generator(device).manual_seed(seed)
    if page is not None:
        count = cache.table.numel()
        order = torch.randperm(count, generator=generator, device=device)
        cache.table.copy_(order.view_as(cache.table))
    step = max(1, CHUNK // cell.batch)
    for start in range(0, cell.tokens - 1, step):
        cache.append(*draw(cell, min(step, cell.tokens - 1 - start), generator))
    return cache


@dataclass(frozen=True)
class Truth:
    """Expected result of the step on some sequences: `sample` [M], their o and blocks, and the
    rows with a selection that no rounding changes."""

    sample: Tensor
    exact: Tensor  # [M, 1, HQ, D], fp64
    same_dtype: Tensor  # by plain torch with that selection
    blocks: Tensor  # [M, 1, HKV, n]
    clear: Tensor  # [M, HKV]


def truth(cell: Cell, new: New, cache: LayerCache, margin: float) -> Truth:
    """Compute the expected result from the cache, which contains the new token, by definition."""
    sample = torch.linspace(0, cell.batch - 1, min(SAMPLE, cell.batch), device=new.q.device)
    sample = sample.round().long()
    exact, blocks, lead = _definition(cell, new, cache, sample, torch.float64, None)
    same, _, _ = _definition(cell, new, cache, sample, cell.torch_dtype, blocks)
    return Truth(sample, exact, same, blocks, lead > margin)


def _definition(cell, new, cache, sample, dtype, blocks):
    """Return (o, the blocks, the lead of the last chosen block over the next [M, HKV])."""
    config, last, scale = cell.config, cell.tokens - 1, cell.dim**-0.5
    device = new.q.device
    q, gates = (x[sample].to(dtype) for x in (new.q, new.gates))
    outputs = {}
    starts = torch.arange(count_compressed(cell.tokens, config), device=device)
    starts = (starts * config.compress_stride).expand(cell.batch, -1)
    rows = cache.page_rows(starts, config.compress_stride)[sample]
    k, v = (cache.take(name, rows).to(dtype) for name in ("k_cmp", "v_cmp"))
    outputs["cmp"], _ = attend(q, k, v, _all(k), scale)
    probs, _ = attention_probs(q, k, _all(k), scale)
    importance = pool(probs.sum(2), count_selectable(cell.tokens, config), config).transpose(1, 2)
    if blocks is None:
        blocks = select(importance, config, first_position=last)
    position = blocks[:, 0].long()[..., None] * config.select_block
    position = position + torch.arange(config.select_block, device=device)
    hidden = ((blocks[:, 0] < 0)[..., None] | (position > last)).flatten(2)  # [M, HKV, S]
    rows = rows_of(cache, cell.tokens)[sample, None].expand(-1, cell.kv_heads, -1)
    rows = rows.gather(2, position.flatten(2).masked_fill(hidden, 0))
    head = torch.arange(cell.kv_heads, device=device)[:, None]
    k, v = (
        cache.tensors[name].flatten(0, 1)[rows, head].transpose(1, 2).to(dtype)
        for name in ("k_slc", "v_slc")
    )
    outputs["slc"], _ = attend(q, k, v, ~hidden[:, :, None], scale)
    k, v = (cache.take(*window_of(cell, cache, side)) for side in "kv")
    k, v = (x[sample].to(dtype) for x in (k, v))
    outputs["win"], _ = attend(q, k, v, _all(k), scale)
    return combine(gates, outputs), blocks, _lead(importance[:, 0], cell)


def _all(k: Tensor) -> Tensor:
    """Mask in which one query sees every key."""
    return torch.ones(1, 1, 1, k.shape[1], dtype=torch.bool, device=k.device)


def rows_of(cache: LayerCache, tokens: int) -> Tensor:
    """Cache rows [B, tokens] of the positions of each sequence."""
    position = torch.arange(tokens, device=cache.device)
    return cache.page_rows(position.expand(cache.shape.batch, -1))


def window_of(cell: Cell, cache: LayerCache, side: str) -> tuple[str, Tensor]:
    """Return (the tensor's name, its rows [B, w]) that the window reads."""
    position = torch.arange(max(0, cell.tokens - cell.config.window), cell.tokens)
    position = position.to(cache.device).expand(cell.batch, -1)
    if cell.shared_kv:
        return f"{side}_slc", cache.page_rows(position)
    return f"{side}_win", cache.ring_rows(position, cache.shape.window_ring)


def _lead(importance: Tensor, cell: Cell) -> Tensor:
    """Lead [M, HKV] by importance [M, HKV, NB]: infinite if all blocks are chosen."""
    config, own = cell.config, (cell.tokens - 1) // cell.config.select_block
    free = importance[..., config.select_initial : own - config.select_local + 1]
    chosen = config.select_count - config.select_initial - config.select_local
    if free.shape[-1] <= chosen or not chosen:
        return torch.full_like(importance[..., 0], float("inf"))
    best = free.topk(chosen + 1).values
    return (best[..., -2] - best[..., -1]) / best[..., -2].clamp(min=1e-30)


def hold(cell: Cell, name: str, got: Tensor, true: Truth) -> accuracy.Error:
    """Check `got` [B, 1, HQ, D] by the accuracy rule in rows with a clear selection."""
    if not bool(true.clear.any()):
        raise AccuracyError(f"{name}: no row of the sample has a selection that is clear")
    rows = true.clear.repeat_interleave(cell.heads // cell.kv_heads, 1)
    given = (x[:, 0][rows] for x in (got[true.sample], true.same_dtype, true.exact))
    return accuracy.hold(name, *given, dtype=cell.torch_dtype)


def tail(cell: Cell, cache: LayerCache) -> dict[str, Tensor]:
    """Rows that a step writes: the new token's and the compressed block that ends with it."""
    config, last = cell.config, cell.tokens - 1
    at = torch.full((cell.batch, 1), last, device=cache.device)
    rows = {"slc": cache.page_rows(at), "raw": cache.ring_rows(at, cache.shape.raw_ring)}
    if not cell.shared_kv:
        rows["win"] = cache.ring_rows(at, cache.shape.window_ring)
    blocks = count_compressed(cell.tokens, config)
    if blocks > count_compressed(last, config):
        start = torch.full_like(at, (blocks - 1) * config.compress_stride)
        rows["cmp"] = cache.page_rows(start, config.compress_stride)
    return {
        f"{side}_{name}": cache.take(f"{side}_{name}", rows[name]) for name in rows for side in "kv"
    }


def written(cell: Cell, new: New, cache: LayerCache) -> None:
    """Raise AccuracyError unless the step wrote to the cache what `LayerCache.append` writes."""
    got = tail(cell, cache)
    cache.append(new.k, new.v, advance=False)
    for name, want in tail(cell, cache).items():
        near = 2 * torch.finfo(cell.torch_dtype).eps * (1 if name.endswith("cmp") else 0)
        if not torch.allclose(got[name].double(), want.double(), rtol=near, atol=near):
            raise AccuracyError(f"the step wrote another {name} than append does")


@dataclass(frozen=True)
class Reads:
    """Result of setting everything that a step must not read to NaN."""

    keys: dict[str, int]  # read by a KV head of a sequence, not NaN
    spoilt: int  # rows of keys and of values that are NaN
    same: bool  # the output is bitwise unchanged
    seen: bool  # a NaN in a key that must be read reaches the output


def reads(
    cell: Cell, cache: LayerCache, true: Truth, before: Tensor, step: Callable[[], Tensor]
) -> Reads:
    """Set everything except what the sample's sequences should read to NaN, and step again.
    Overwrites the cache."""
    config, last = cell.config, cell.tokens - 1
    blocks = true.blocks[:, 0].long()  # [M, HKV, n]
    index = torch.arange(cell.tokens, device=cache.device)
    read = (blocks[..., None] == index // config.select_block).any(-2)  # [M, HKV, T]
    keys = {"slc": int(read.sum(-1).max()), "cmp": count_compressed(cell.tokens, config)}
    if cell.shared_kv:
        read |= index > last - config.window
    rows = rows_of(cache, cell.tokens)[true.sample]
    spoilt = 0
    for name in ("k_slc", "v_slc"):
        flat = cache.tensors[name].flatten(0, 1)
        for row, kept in zip(rows, read, strict=True):
            flat[row] = flat[row].masked_fill(~kept.T[..., None], float("nan"))
    spoilt += int((~read).sum())
    name, kept = window_of(cell, cache, "k")
    keys["win"] = kept.shape[1]
    if not cell.shared_kv:
        for name in ("k_win", "v_win"):
            ring = cache.tensors[name].flatten(0, 1)
            unread = torch.ones(len(ring), dtype=torch.bool, device=ring.device)
            unread[kept.flatten()] = False
            ring[unread] = float("nan")
        spoilt += int(unread.sum()) * cell.kv_heads
    rows_clear = true.clear.repeat_interleave(cell.heads // cell.kv_heads, 1)

    def clear(o: Tensor) -> Tensor:
        return o[true.sample][:, 0][rows_clear]

    same = torch.equal(clear(step()), clear(before))
    first = blocks[:, :, :1] * config.select_block  # a block's first token; the first is forced
    head = torch.arange(cell.kv_heads, device=cache.device)
    cache.tensors["k_slc"].flatten(0, 1)[rows.gather(1, first[..., 0]), head] = float("nan")
    seen = not bool(clear(step()).isfinite().any())
    return Reads(keys, spoilt, same, seen)
