"""Sizes of a cache and locations of each sequence's tokens, shared by all layers."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from nsa.attention.inputs import DTYPES
from nsa.blocks import count_compressed
from nsa.config import NSAConfig, as_int, other_than
from nsa.reference.nsa import BRANCHES

RING_GRAIN = 16  # rings are rounded up to a multiple


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a layer's cache. `capacity` is rounded up to whole pages, or blocks of l'.

    Contiguous (`page` None): a sequence is one page of `capacity` tokens. Paged: a page holds
    `page` tokens, a multiple of l', and all sequences share `pages` of them; None means enough for
    every sequence to be full.

    Raises ValueError for sizes that do not fit, with sizes that do.
    """

    config: NSAConfig
    batch: int  # B
    capacity: int  # tokens that a sequence may have
    kv_heads: int  # HKV
    dim: int  # D
    value_dim: int  # DV
    dtype: torch.dtype = torch.bfloat16
    branches: tuple[str, ...] = BRANCHES
    shared: bool = False  # the window reads the keys and values of slc, and has none of its own
    slack: int = 16  # most new tokens of a kernel's call, and most that can be cropped
    page: int | None = None  # tokens of a page
    pages: int | None = None  # P

    def __post_init__(self) -> None:
        for name in ("batch", "capacity", "kv_heads", "dim", "value_dim", "slack"):
            object.__setattr__(self, name, _size(name, getattr(self, name)))
        if not isinstance(self.config, NSAConfig):
            raise ValueError(f"config {other_than('NSAConfig', self.config)}")
        if self.dtype not in DTYPES:
            would = ", ".join(map(str, DTYPES))
            raise ValueError(f"dtype={self.dtype} is no dtype of a cache; these would do: {would}")
        given = (self.branches,) if isinstance(self.branches, str) else tuple(self.branches)
        branches = tuple(b for b in BRANCHES if b in given)
        if not branches or not set(given) <= set(BRANCHES):
            raise ValueError(f"branches={given!r}; choose at least one of {BRANCHES}")
        object.__setattr__(self, "branches", branches)
        block = self.config.select_block
        if self.page is None and self.pages is not None:
            raise ValueError(f"pages={self.pages} needs a page size; page={block} would do")
        if self.page is not None:
            object.__setattr__(self, "page", _size("page", self.page))
            if self.page % block:
                below = self.page // block * block
                near = [n for n in (below, below + block) if n]
                raise ValueError(
                    f"page={self.page} is not a multiple of select_block={block}; nearest that "
                    f"are: {' and '.join(map(str, near))}"
                )
        whole = self.page or block
        object.__setattr__(self, "capacity", -(-self.capacity // whole) * whole)
        if self.pages is not None:
            object.__setattr__(self, "pages", _size("pages", self.pages))

    @property
    def page_size(self) -> int:
        """Tokens per page; the capacity if each sequence has one page."""
        return self.page or self.capacity

    @property
    def pages_each(self) -> int:
        """Entries of a sequence in the page table."""
        return self.capacity // self.page_size

    @property
    def pool(self) -> int:
        """Number of pages in the pool, P."""
        return self.batch * self.pages_each if self.pages is None else self.pages

    @property
    def window_ring(self) -> int:
        """Tokens in the ring of window keys, R; 0 if there is none."""
        kept = "win" in self.branches and not self.shared
        return _ring(self.config.window + self.slack) if kept else 0

    @property
    def raw_ring(self) -> int:
        """Tokens in the ring of keys not compressed yet, S; 0 if there is none."""
        kept = "cmp" in self.branches or "slc" in self.branches
        return _ring(self.config.compress_block + self.slack) if kept else 0

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor of a layer, by name."""
        size, stride = self.page_size, self.config.compress_stride
        kept = {}
        if "slc" in self.branches or ("win" in self.branches and self.shared):
            kept["slc"] = self.pool, size
        if self.raw_ring:
            kept |= {"cmp": (self.pool, size // stride), "raw": (self.batch, self.raw_ring)}
        if self.window_ring:
            kept["win"] = self.batch, self.window_ring
        found = {}
        for name, rows in kept.items():
            found[f"k_{name}"] = (*rows, self.kv_heads, self.dim)
            if "cmp" in self.branches or name in ("slc", "win"):
                found[f"v_{name}"] = (*rows, self.kv_heads, self.value_dim)
        return found

    @property
    def bytes(self) -> int:
        """Bytes of one layer's tensors, each with its row of zeros."""
        rows = sum(
            (math.prod(shape[:2]) + 1) * math.prod(shape[2:]) for shape in self.tensors().values()
        )
        return rows * self.dtype.itemsize

    @property
    def places_bytes(self) -> int:
        """Bytes of the tensors shared by all layers: page table, lengths and newest."""
        return 4 * self.batch * (self.pages_each + 2)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` restores the same shape."""
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CacheShape":
        """Restore the shape from `to_dict`. ValueError for a name that is unknown or missing."""
        known = {f.name for f in fields(cls)}
        if set(values) != known:
            wrong = ", ".join(sorted(set(values) ^ known))
            raise ValueError(f"a cache's shape has fields unknown or missing: {wrong}")
        dtype, config = getattr(torch, values["dtype"]), NSAConfig(**values["config"])
        return cls(**{**values, "dtype": dtype, "config": config})


class Places:
    """Locations of the tokens of B sequences: shared by a model's layers, advanced once per step.

    `lengths` [B] int32 counts the tokens held, `newest` [B] int32 the most that were ever held
    since a reset, `table` [B, capacity / page] int32 names each sequence's pages, -1 for none yet.
    They are on the device, and nothing in a step waits for it: the host keeps upper bounds on the
    lengths, `held`, a list of B ints. If there are fewer pages than full sequences need, the table
    starts empty and the owner of the cache fills it.
    """

    def __init__(self, shape: CacheShape, device: torch.device | str | None = None) -> None:
        self.shape, self.held, self._stale = shape, [0] * shape.batch, False
        each, wanted = shape.pages_each, shape.batch * shape.pages_each
        if shape.pool >= wanted:
            table = torch.arange(wanted, dtype=torch.int32, device=device)
        else:
            table = torch.full((wanted,), -1, dtype=torch.int32, device=device)
        self.table = table.view(shape.batch, each)
        self.lengths = torch.zeros(shape.batch, dtype=torch.int32, device=device)
        self.newest = torch.zeros_like(self.lengths)

    @property
    def longest(self) -> int:
        """Upper bound on all lengths."""
        return max(self.held)

    def bound(self, new: int = 0) -> int:
        """Upper bound on a sequence's tokens after `new` more; the capacity in a CUDA graph."""
        full = self.shape.capacity
        return full if self.capturing else min(self.longest + new, full)

    @property
    def stale(self) -> bool:
        """True if there may be nonzero values behind a sequence's end."""
        return self._stale or self.capturing

    def room(self, new: int | Sequence[int], counts: Tensor | None = None) -> list[int]:
        """Return upper bounds of the lengths after `new` more tokens, one number for all sequences
        or one for each (or counts [B] of them). ValueError unless they fit.

        Waits for the GPU only if by the host's bounds they may not fit.
        """
        full, added = self.shape.capacity, self._each(new)
        if self.longest + max(added) > full and not self.capturing:
            self.look()
            added = added if counts is None else counts.clamp(0, new).tolist()
        wanted = [held + more for held, more in zip(self.held, added, strict=True)]
        for b, tokens in enumerate(wanted):
            if tokens > full:
                raise ValueError(
                    f"the cache is full: sequence {b} has {self.held[b]} of {full} tokens and "
                    f"{added[b]} more do not fit; a cache of capacity={tokens} would do, or crop "
                    "or reset it"
                )
        return wanted

    def advance(self, new: int, counts: Tensor | None = None) -> None:
        """Add `new` tokens to each length, or counts [B] int32 of them, 0 to new."""
        self.grow(new, counts)
        self.count(new)

    def grow(self, new: int, counts: Tensor | None = None) -> None:
        """Device part of `advance`, which a CUDA graph replays; `count` is the host part."""
        if new < 0:
            raise ValueError(f"a cache cannot advance by {new} tokens; crop(lengths) shortens it")
        self.lengths.add_(new if counts is None else counts.clamp(0, new))
        self.lengths.clamp_(0, self.shape.capacity)
        torch.maximum(self.newest, self.lengths, out=self.newest)

    def count(self, new: int | Sequence[int]) -> None:
        """Update the host's bounds: at most so many tokens more, of all sequences or of each."""
        full, added = self.shape.capacity, self._each(new)
        self.held = [min(held + n, full) for held, n in zip(self.held, added, strict=True)]

    def look(self) -> None:
        """Read the lengths, so that the host's bounds are exact. Waits for the device."""
        self.held = self.lengths.tolist()

    def _each(self, new: int | Sequence[int]) -> list[int]:
        return [new] * self.shape.batch if isinstance(new, int) else list(new)

    def crop(self, lengths: int | Sequence[int] | Tensor, *, check: bool = True) -> None:
        """Drop tokens of each sequence beyond `lengths`, one for all or [B].

        check: read the lengths back and refuse those that are out of range or overwritten: a ring
        holds `slack` tokens more than a step needs. Otherwise nothing waits for the GPU and a
        length above the held one has no effect.

        Raises:
            ValueError: a length below 0, above the held one, or whose tokens are overwritten.
        """
        wanted = torch.as_tensor(lengths, dtype=torch.int32, device=self.lengths.device)
        if wanted.ndim == 0:
            wanted = wanted.expand_as(self.lengths)
        if wanted.shape != self.lengths.shape:
            got, batch = tuple(wanted.shape), self.shape.batch
            raise ValueError(f"crop needs one length or {batch}, one a sequence; got shape {got}")
        if check:
            held, newest = self.lengths.tolist(), self.newest.tolist()
            for b, (keep, has, most) in enumerate(zip(wanted.tolist(), held, newest, strict=True)):
                if not 0 <= keep <= has:
                    raise ValueError(
                        f"crop: sequence {b} holds {has} tokens and cannot be cropped to {keep}"
                    )
                if keep < has and not self._keeps(keep, most):
                    raise ValueError(
                        f"crop: sequence {b} has held {most} tokens, so its rings go back to "
                        f"{max(0, most - self.shape.slack)} for certain and {keep} is overwritten; "
                        f"slack={self.shape.slack} of the cache bounds it, and 0 forgets all"
                    )
            self.held = wanted.tolist()
        self._stale = True
        self.lengths.copy_(torch.minimum(wanted.clamp(min=0), self.lengths))
        self.newest.masked_fill_(self.lengths == 0, 0)

    def _keeps(self, length: int, newest: int) -> bool:
        """True if the rings still hold all tokens that the next one after `length` needs."""
        shape, config = self.shape, self.shape.config
        if length == 0:
            return True
        first_raw = count_compressed(length, config) * config.compress_stride
        needed = (
            (shape.window_ring, max(0, length - config.window + 1)),
            (shape.raw_ring, first_raw),
        )
        return all(first >= newest - ring for ring, first in needed if ring)

    def reset(self, rows: Sequence[int] | Tensor | None = None) -> None:
        """Empty these sequences, all by default. They keep their pages."""
        rows = self.index("rows", range(self.shape.batch) if rows is None else rows)
        self._stale = True
        self.lengths[rows] = 0
        self.newest[rows] = 0
        for row in rows.tolist():
            self.held[row] = 0

    def reorder(self, index: Tensor) -> None:
        """Replace the lengths of sequence b by those of index[b]; it keeps its own pages."""
        self.take(self, index)

    def take(self, other: "Places", rows: Tensor) -> None:
        """Copy the lengths of these rows of another cache. Waits for the device."""
        self.lengths.copy_(other.lengths[rows])
        self.newest.copy_(other.newest[rows])
        self._stale = True
        self.look()

    def state(self) -> dict[str, Tensor]:
        """Tensors to save, by name."""
        return {"table": self.table, "lengths": self.lengths, "newest": self.newest}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the tensors from `state` of a cache of the same shape. Waits for the device."""
        for name, x in self.state().items():
            x.copy_(tensors[name])
        self._stale = True
        self.look()

    def index(self, name: str, rows: Sequence[int] | Tensor) -> Tensor:
        """`rows` as int64 on the device; ValueError for indices outside the cache's sequences."""
        rows = torch.as_tensor(rows, device=self.lengths.device).long()
        outside = rows.ndim != 1 or not rows.numel()
        if outside or bool(((rows < 0) | (rows >= self.shape.batch)).any()):
            raise ValueError(
                f"{name} must be a list of sequences out of 0..{self.shape.batch - 1}, got "
                f"{rows.tolist()}"
            )
        return rows

    def check(self, new: int = 0, counts: Tensor | None = None) -> None:
        """Check lengths, counts and page table in strict mode. Waits for the GPU.

        Raises:
            ValueError: a length outside 0..capacity or beyond what was appended, a count outside
                0..new, a page out of range, held by two, or missing where tokens are or will be.
        """
        shape, table = self.shape, self.table
        lengths, newest = self.lengths.tolist(), self.newest.tolist()
        for b, (length, most) in enumerate(zip(lengths, newest, strict=True)):
            if not 0 <= length <= shape.capacity or length > most:
                raise ValueError(
                    f"lengths[{b}]={length} is outside 0..{min(most, shape.capacity)}, what was "
                    "appended"
                )
            if not self._keeps(length, most):
                raise ValueError(
                    f"lengths[{b}]={length} runs backwards: {most} tokens were appended and the "
                    f"rings go back by slack={shape.slack}; crop() checks that"
                )
        added = [new] * shape.batch if counts is None else counts.tolist()
        if not all(0 <= count <= new for count in added):
            raise ValueError(f"counts={added} must be within 0..{new}, the new tokens")
        found = table.tolist()
        pages = [page for row in found for page in row]
        uses = Counter(pages)
        if shape.page is None and pages != list(range(shape.batch)):
            raise ValueError(f"table={pages}: a contiguous cache has page b for sequence b")
        if pages and not -1 <= min(pages) <= max(pages) < shape.pool:
            raise ValueError(
                f"table holds pages from {min(pages)} to {max(pages)}; legal are "
                f"0..{shape.pool - 1}, and -1 for none"
            )
        for b, row in enumerate(found):
            needed = -(-(lengths[b] + added[b]) // shape.page_size)
            if -1 in row[:needed]:
                raise ValueError(
                    f"sequence {b} needs {needed} pages and its table begins {row[:needed]}; "
                    "give it pages before its tokens"
                )
            first = lengths[b]  # written from here on: compressed keys stand where blocks begin
            if shape.raw_ring:
                first = count_compressed(first, shape.config) * shape.config.compress_stride
            for page in row[first // shape.page_size : needed]:
                if uses[page] > 1:
                    raise ValueError(f"page {page} of sequence {b} is held twice and written to")

    @property
    def capturing(self) -> bool:
        """True while a CUDA graph is captured on this device."""
        return self.lengths.is_cuda and torch.cuda.is_current_stream_capturing()


def _size(name: str, value: object) -> int:
    try:
        size = as_int(name, value)
    except TypeError:
        size = 0
    if size < 1:
        raise ValueError(f"{name}={value!r} must be an int of at least 1")
    return size


def _ring(tokens: int) -> int:
    return -(-tokens // RING_GRAIN) * RING_GRAIN
