"""Cache of one attention layer for sequences that grow a few tokens at a time.

Selected keys and compressed keys are in pages, window keys and keys not compressed yet in rings.
Every tensor has one more row, of zeros, behind the visible ones: the null row. Hidden keys are read
there and rows that must not be stored are written there, so that no step waits for the GPU.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nsa.attention.places import CacheShape, Places
from nsa.blocks import compressed_span
from nsa.config import NSAConfig
from nsa.reference.compress import Phi, compress
from nsa.reference.rotary import rotate

PAGED = ("slc", "cmp")  # the other tensors are rings
NAMES = tuple(f"{side}_{name}" for name in (*PAGED, "win", "raw") for side in "kv")


class LayerCache:
    """Keys and values of B sequences in one layer; names and shapes as in the kernels.

    k_slc [P, page, HKV, D], v_slc [P, page, HKV, DV]: every token, rotated. Position t of sequence
        b is in page table[b, t // page], row t % page.
    k_cmp, v_cmp [P, page / d, HKV, *]: compressed block i begins at token i d, and is in that
        token's page, row (i d % page) / d.
    k_win, v_win [B, R, HKV, *]: a ring, position t in row t % R; none where the window reads slc.
    k_raw, v_raw [B, S, HKV, *]: a ring of the compressed branch's tokens before phi, row t % S.

    `tensors` has them by name, without those that no branch needs. `places` has the page table and
    the lengths; layers of one model share it. No gradient flows through a cache.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        places: Places | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        device = places.lengths.device if places is not None and device is None else device
        self.shape = shape
        self.places = Places(shape, device) if places is None else places
        if self.places.shape != shape:
            raise ValueError("layers that share places must have one shape")
        self._flat, self.tensors = {}, {}
        for name, size in shape.tensors().items():
            rows, row = size[0] * size[1], size[2:]
            flat = torch.zeros(rows + 1, *row, dtype=shape.dtype, device=device)
            self._flat[name], self.tensors[name] = flat, flat[:rows].view(size)

    table = property(lambda self: self.places.table)
    lengths = property(lambda self: self.places.lengths)
    longest = property(lambda self: self.places.longest)

    @property
    def config(self) -> NSAConfig:
        return self.shape.config

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    @property
    def bytes(self) -> int:
        """Bytes of this layer's tensors, equal to the estimate `CacheShape.bytes`."""
        return sum(flat.numel() * flat.element_size() for flat in self._flat.values())

    @torch.no_grad()
    def append(
        self,
        k: Tensor | Mapping[str, Tensor],
        v: Tensor | Mapping[str, Tensor],
        phi: Phi | None = None,
        counts: Tensor | None = None,
        *,
        advance: bool = True,
    ) -> None:
        """Append N tokens to each sequence and compress the blocks that they complete.

        k, v: [B, N, HKV, D] and [B, N, HKV, DV], one for all branches or a mapping; rotated, but
        for "cmp" where phi rotates. counts [B]: the first so many are stored. advance: False leaves
        the lengths to the caller's `places.advance(N, counts)`, after all layers.

        Raises ValueError if they do not fit, before anything is written.
        """
        k = self.check_given("k", k)
        new = next(iter(k.values())).shape[1]
        v = self.check_given("v", v, new)
        self.places.room(new, counts)
        held = self.lengths.long()
        added = torch.full_like(held, new) if counts is None else counts.long().clamp(0, new)
        position = held[:, None] + torch.arange(new, device=self.device)
        stored = position < (held + added)[:, None]
        if self.shape.raw_ring:
            self._compress(k, v, phi or Phi(), held, added)
        rows = {}
        for key, x in (k | v).items():
            name = key[2:]
            if name not in rows:
                if name == "slc":
                    kept = position.where(stored, -1)
                    rows[name] = self.page_rows(kept)
                else:  # a ring keeps only the newest tokens
                    ring = self.tensors[key].shape[1]
                    newest = stored & (position >= (held + added - ring)[:, None])
                    rows[name] = self.ring_rows(position.where(newest, -1), ring)
            self._put(key, rows[name], x)
        if advance:
            self.places.advance(new, counts)

    def check_given(
        self, side: str, x: Tensor | Mapping[str, Tensor], new: int | None = None
    ) -> dict[str, Tensor]:
        """Return `given`; ValueError unless the tensors fit the cache and have `new` rows."""
        found = self.given(side, x)
        for key, one in found.items():
            if not isinstance(one, Tensor):
                raise ValueError(f"{key} is a {type(one).__name__} and must be a tensor")
            if new is None and one.ndim == 4:
                new = one.shape[1]
            wanted = (self.shape.batch, new, *self.tensors[key].shape[2:])
            if tuple(one.shape) != wanted or not new:
                raise ValueError(
                    f"{key} must be [B, N, HKV, {'D' if side == 'k' else 'DV'}] = {wanted} with "
                    f"N of at least 1, got {tuple(one.shape)}"
                )
            if one.dtype != self.shape.dtype or one.device != self.device:
                raise ValueError(
                    f"{key} is {one.dtype} on {one.device} and the cache {self.shape.dtype} on "
                    f"{self.device}; make them equal"
                )
        return found

    def given(self, side: str, x: Tensor | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map a call's k or v to the cache tensors that store it; ValueError for a missing branch.

        side: "k" or "v". The keys are k_slc, k_win and k_raw, or those of v, as far as they exist.
        """
        names = [key[2:] for key in self.tensors if key[0] == side and key[2:] != "cmp"]
        branch = {name: "cmp" if name == "raw" else name for name in names}
        if isinstance(x, Tensor):
            return {f"{side}_{name}": x for name in names}
        if self.shape.shared and "slc" in names:
            given = [x[b] for b in ("slc", "win") if b in x]
            if not given:
                raise ValueError(f"{side} has no entry for slc; it has {sorted(x)}")
            if given[0] is not given[-1]:
                raise ValueError(
                    f"{side}['win'] and {side}['slc'] must be one tensor in a cache with "
                    "shared=True; shared=False keeps both"
                )
            x = {**x, "slc": given[0]}
        missing = [branch[name] for name in names if branch[name] not in x]
        if missing:
            raise ValueError(f"{side} has no entry for {', '.join(missing)}; it has {sorted(x)}")
        return {f"{side}_{name}": x[branch[name]] for name in names}

    def page_rows(self, position: Tensor, stride: int = 1) -> Tensor:
        """Rows of a paged tensor that hold positions [B, ...] int64, `stride` tokens per row.

        The null row for a position outside 0..capacity-1 and for one whose page is not in the pool.
        """
        size, pool = self.shape.page_size, self.shape.pool
        slot = (position // size).clamp(0, self.shape.pages_each - 1)
        page = self.table.long().gather(1, slot.flatten(1)).view_as(slot)
        kept = (position >= 0) & (position < self.shape.capacity) & (page >= 0) & (page < pool)
        rows = page * (size // stride) + position % size // stride
        return rows.where(kept, pool * (size // stride))

    def ring_rows(self, position: Tensor, ring: int) -> Tensor:
        """Rows of a ring of that many tokens that hold positions [B, ...]; the null row below 0."""
        first = torch.arange(position.shape[0], device=position.device) * ring
        first = first.view(-1, *[1] * (position.ndim - 1))
        return (first + position % ring).where(position >= 0, position.shape[0] * ring)

    def take(self, key: str, rows: Tensor) -> Tensor:
        """The tensor `key` at rows [...]: [..., HKV, *], zeros at the null row."""
        return self._flat[key][rows]

    def rows(self, key: str) -> Tensor:
        """The tensor `key` as rows by KV head, [(rows + 1) HKV, *]: the last HKV are zeros."""
        return self._flat[key].flatten(0, 1)

    def _put(self, key: str, rows: Tensor, x: Tensor) -> None:
        flat = self._flat[key]
        null = (rows == flat.shape[0] - 1)[..., None, None]
        flat[rows] = x.masked_fill(null, 0)

    def recent(
        self, name: str, reach: int, k: Tensor, v: Tensor, counts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(k, v) [B, reach + N, HKV, *]: the newest `reach` tokens held, then the N new ones.

        Column j is at position lengths - reach + j; zeros where that is below 0, and where a new
        one is not among the first counts [B]. Call it before the new ones are appended, since
        they overwrite older ones in a ring.
        """
        if counts is not None:
            behind = torch.arange(k.shape[1], device=self.device) >= counts[:, None]
            k, v = (x.masked_fill(behind[..., None, None], 0) for x in (k, v))
        back = torch.arange(-reach, 0, device=self.device)
        position = self.lengths.long()[:, None] + back
        ring = self.shape.window_ring
        rows = self.page_rows(position) if name == "slc" else self.ring_rows(position, ring)
        old_k, old_v = self.take(f"k_{name}", rows), self.take(f"v_{name}", rows)
        return torch.cat([old_k, k], 1), torch.cat([old_v, v], 1)

    def tokens(self, count: int, ends: Tensor) -> tuple[Tensor, Tensor]:
        """(k, v) [B, count, HKV, *] of the selected branch in the order of their positions.

        Values are finite behind a sequence's end, ends [B] tokens, whatever was stored there.
        """
        return self._in_order("slc", count, 1, ends)

    def compressed(self, count: int, ends: Tensor) -> tuple[Tensor, Tensor | None]:
        """(k_cmp, v_cmp) [B, count, HKV, *] in order; v_cmp None if no branch needs it.

        Values are finite behind those of the first ends [B] tokens, whatever was stored there.
        """
        ended = compressed_span(self.config).ended(ends - 1)
        return self._in_order("cmp", count, self.config.compress_stride, ended)

    def _in_order(
        self, name: str, count: int, stride: int, ends: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        k, v = f"k_{name}", f"v_{name}"
        index = torch.arange(count, device=self.device)
        behind = index >= ends[:, None]
        if self.shape.page is not None:
            position = index * stride
            rows = self.page_rows(torch.where(behind, -1, position), stride)
            return self.take(k, rows), self.take(v, rows) if v in self._flat else None
        keys, values = self.tensors[k][:, :count], self.tensors.get(v)
        if values is not None:
            values = values[:, :count]
            if self.places.stale:  # 0 times a NaN is NaN
                values = values.masked_fill(behind[..., None, None], 0)
        return keys, values

    def _compress(
        self, k: dict[str, Tensor], v: dict[str, Tensor], phi: Phi, held: Tensor, added: Tensor
    ) -> None:
        """Append the blocks that end within the `added` [B] tokens behind the `held` [B]."""
        span = compressed_span(self.config)
        new, stride, length = k["k_raw"].shape[1], span.stride, span.length
        first, end = (span.ended(x - 1).clamp(min=0) for x in (held, held + added))
        if self.device.type == "cpu" and not bool((end > first).any()):
            return
        most = -(-new // stride)  # blocks that new tokens can end
        position = first[:, None] * stride + torch.arange(
            (most - 1) * stride + length, device=self.device
        )
        index = (position - held[:, None]).clamp(0, new - 1)  # of the new token, if it is one
        ring = self.ring_rows(position, self.shape.raw_ring)
        batch = torch.arange(position.shape[0], device=self.device)[:, None]
        is_held = (position < held[:, None])[..., None, None]
        block = first[:, None] + torch.arange(most, device=self.device)  # [B, M]
        ended = block < end[:, None]
        rows = self.page_rows((block * stride).where(ended, -1), stride)
        for side, given, weights in (("k", k, phi.key), ("v", v, phi.value)):
            if f"{side}_cmp" not in self._flat:
                continue
            raw = f"{side}_raw"
            tokens = torch.where(is_held, self.take(raw, ring), given[raw][batch, index])
            x = compress(tokens, phi.kind, weights, self.config)
            if side == "k" and phi.rotary is not None:
                last = phi.rotary[0].shape[0] - 1
                starts = (block * stride).clamp(max=last).flatten()
                turned = rotate(x.flatten(0, 1)[None], *phi.rotary, positions=starts)
                x = turned[0].unflatten(0, x.shape[:2])
            self._put(f"{side}_cmp", rows, x)

    def advance(self, new: int, counts: Tensor | None = None) -> None:
        """Call `places.advance`, after `append(advance=False)`."""
        self.places.advance(new, counts)

    def crop(self, lengths: int | Sequence[int] | Tensor, *, check: bool = True) -> None:
        """Call `places.crop`: drop tokens beyond `lengths`, as speculative decoding does."""
        self.places.crop(lengths, check=check)

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Empty these sequences; all by default."""
        self.places.reset(rows)

    @torch.no_grad()
    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages of the pool onto others."""
        for key, view in self.tensors.items():
            if key[2:] in PAGED:
                view[target] = view[source]

    @torch.no_grad()
    def reorder_rings(self, index: Tensor) -> None:
        """Replace the rings of sequence b by those of sequence index[b]."""
        for key, view in self.tensors.items():
            if key[2:] not in PAGED:
                view.copy_(view[index])
