"""Cache of a model for generation: keys and values per layer, lengths shared by all layers."""

import os
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from nsa.attention.cache import LayerCache
from nsa.attention.decode import names
from nsa.attention.inputs import check_counts
from nsa.attention.places import CacheShape, Places
from nsa.model.config import ModelConfig, check_config
from nsa.model.pages import Pages
from nsa.model.reads import by_branch, keys_read
from nsa.model.rotary import Rotary, next_positions
from nsa.model.saving import FREE, VERSION, read, write
from nsa.reference.nsa import BRANCHES
from nsa.reference.rotary import rotary_tables
from nsa.spelling import choice

FORMAT = "nsa cache"
# Fields that a cache does not depend on, besides those that may change between runs.
OTHER = {"vocab", "mlp_hidden", "gate", "gate_temperature", "gate_init", "stopgrad_gates", "sinks"}


class NSACache:
    """Keys and values of B sequences in all layers of a model; see `LayerCache` for its tensors.

    Contiguous, each sequence has room for `capacity` tokens from the start. Paged (`page` tokens
    each, a multiple of the selection block), sequences get pages from a pool when they grow, and
    `reorder` lets them share common prefixes. `lengths` [B] int32 is on the device; the host
    keeps an upper bound, so that nothing in a step waits for the device.

    Args:
        batch, capacity: B, and the maximum tokens per sequence; rounded up to whole pages.
        dtype: dtype of keys and values: the model's, or autocast's.
        pages: pages in the pool; None: enough for every sequence to be full.
        slack: maximum new tokens per kernel call, and maximum tokens that a crop removes.
        backend: decoding backend, see `nsa.attention.decode.nsa_decode`.

    Raises:
        TypeError: a config that is not a ModelConfig.
        ValueError: sizes that do not fit, dense attention, an unknown backend.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        page: int | None = None,
        pages: int | None = None,
        slack: int = 16,
        backend: str = "auto",
    ) -> None:
        check_config(config)
        choice("backend", backend, ("auto", *names()))
        sizes = {"dtype": dtype, "page": page, "pages": pages, "slack": slack}
        self.config, self.shape = config, shape_of(config, batch, capacity, **sizes)
        self.backend = backend
        self.places = Places(self.shape, device)
        make = partial(LayerCache, self.shape, places=self.places, device=device)
        self.layers = [make() for _ in range(config.layers)]
        self.pages = None
        if page is not None:
            self.pages = Pages(self.places.table, page, self.shape.pool)
        angles = {"device": device, "scale": config.rope_scale}
        self.tables = rotary_tables(
            self.shape.capacity, config.head_dim, config.rope_base, **angles
        )
        self._step = torch.zeros(2, self.shape.batch, dtype=torch.int32, device=device)
        self._dropped = torch.zeros(3, dtype=torch.int64, device=device)

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Number of tokens of each sequence."""
        return self.places.lengths

    @property
    def longest(self) -> int:
        """Upper bound on all lengths."""
        return self.places.longest

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, equal to the estimate `bytes_for`."""
        shared = (self.places.table, self.lengths, self.places.newest, *self.tables)
        shared += (self._step, self._dropped)
        own = sum(x.numel() * x.element_size() for x in shared)
        return own + sum(layer.bytes for layer in self.layers)

    @staticmethod
    def bytes_for(config: ModelConfig, batch: int, capacity: int, **sizes: Any) -> int:
        """Estimate the bytes of a cache; dtype, page, pages and slack as in the constructor."""
        shape = shape_of(config, batch, capacity, **{"dtype": torch.float32} | sizes)
        angles = 2 * shape.capacity * (config.head_dim // 2) * 4
        counters = 2 * shape.batch * 4 + 3 * 8
        return config.layers * shape.bytes + shape.places_bytes + angles + counters

    def check(
        self, config: ModelConfig, tokens: Tensor, counts: Tensor | Sequence[int] | None = None
    ) -> tuple[Tensor | None, int | list[int]]:
        """ValueError unless this cache accepts tokens [B, N] of a model of that config, counts[b]
        of them real. Returns (counts on its device, their upper bound on the host)."""
        free = FREE["model"] | OTHER | {"max_tokens", "norm_eps"}
        named = [field.name for field in fields(ModelConfig) if field.name not in free]
        differing = [
            f"{name}: {theirs!r}, {ours!r}"
            for name in named
            if (theirs := getattr(config, name)) != (ours := getattr(self.config, name))
        ]
        if differing:
            raise ValueError(
                f"the cache is of another config (the model's, the cache's): "
                f"{'; '.join(differing)}; NSACache(model.config, ...) fits"
            )
        if tokens.shape[0] != self.shape.batch:
            raise ValueError(
                f"tokens are of {tokens.shape[0]} sequences and the cache of {self.shape.batch}; "
                f"NSACache(model.config, {tokens.shape[0]}, ...) fits, or select(rows)"
            )
        if tokens.device != self.device:
            raise ValueError(f"tokens are on {tokens.device} and the cache on {self.device}")
        if counts is None:
            return None, tokens.shape[1]
        counts = torch.as_tensor(counts)
        check_counts(counts, self.shape.batch)
        if counts.device.type != "cpu":
            return counts, tokens.shape[1]
        known = counts.tolist()
        if min(known) < 0 or max(known) > tokens.shape[1]:
            raise ValueError(f"counts={known} must be within 0..{tokens.shape[1]}, the new tokens")
        return counts.int().to(self.device), known

    def reserve(self, new: int | Sequence[int]) -> None:
        """Reserve room for `new` more tokens, one number for all sequences or one for each.

        ValueError, without any change, if a sequence or the page pool would overflow. Waits for the
        device only if by the host's bound the tokens may not fit.
        """
        wanted = self.places.room(new)
        if self.pages is not None:
            self.pages.reserve(wanted)

    def advance(self, new: int, counts: Tensor | None = None) -> None:
        """Add `new` tokens to each sequence of all layers, or counts [B] of them: the device part,
        which a CUDA graph replays; `count` is the host part."""
        self._step[0].copy_(self.lengths)
        self.places.grow(new, counts)
        self._step[1].copy_(self.lengths)

    def count(self, new: int | Sequence[int]) -> None:
        """Update the host's bounds for an `advance`: at most this many tokens more."""
        self.places.count(new)

    def rotary(self, new: int) -> Rotary:
        """Rotary tables of the next `new` tokens of each sequence."""
        return Rotary(*self.tables, next_positions(self.lengths, self.shape.capacity, new))

    @torch.no_grad()
    def crop(self, lengths: int | Sequence[int] | Tensor, *, check: bool = True) -> None:
        """Drop tokens of each sequence beyond `lengths`, one for all or [B], as `Places.crop`.

        Pages that a sequence no longer needs are freed; shared pages that it will write into are
        copied for it. Without `check` nothing waits for the device, unless pages are shared.

        Raises ValueError, without any change, for invalid lengths or a full pool.
        """
        before, newest = self.lengths.clone(), self.places.newest.clone()
        self.places.crop(lengths, check=check)
        try:
            if self.pages is not None and (check or self.pages.shared):
                self.places.look()
                same = range(self.shape.batch)
                self._copy(*self.pages.reorder(same, self.places.held, self._back))
        except ValueError:
            self.lengths.copy_(before)
            self.places.newest.copy_(newest)
            self.places.look()
            raise
        self._drop(before)

    @torch.no_grad()
    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Replace sequence b by sequence index[b], as beam search needs.

        Contiguous, sequences that change are copied. Paged, they share complete pages, and each
        gets its own copy of the last ones, which are still written to. Waits for the device.
        ValueError, without any change, for invalid indices or a full pool.
        """
        rows = self.places.index("index", index)
        if len(rows) != self.shape.batch:
            raise ValueError(f"index needs {self.shape.batch} entries, got {len(rows)}")
        before, wanted = self.lengths.clone(), rows.tolist()
        if self.pages is not None:
            kept = self.lengths[rows].tolist()
            self._copy(*self.pages.reorder(wanted, kept, self._back))
        else:
            moved = [(source, b) for b, source in enumerate(wanted) if source != b]
            self._copy([source for source, _ in moved], [b for _, b in moved])
        for layer in self.layers:
            layer.reorder_rings(rows)
        self.places.reorder(rows)
        self._drop(before)

    @torch.no_grad()
    def select(self, rows: Sequence[int] | Tensor, capacity: int | None = None) -> "NSACache":
        """Return a new cache with copies of these sequences, in this order; one may occur twice. A
        larger `capacity` makes room. Its counters start with the keys that its sequences have
        read. Waits for the device. ValueError if the sequences do not fit."""
        rows, shape = self.places.index("rows", rows), self.shape
        sizes = {"dtype": shape.dtype, "page": shape.page, "slack": shape.slack}
        sizes |= {"device": self.device, "backend": self.backend}
        cut = NSACache(self.config, len(rows), capacity or shape.capacity, **sizes)
        lengths = self.lengths[rows].tolist()
        cut.reserve(lengths)
        held = [self._pages_of(row, n) for row, n in zip(rows.tolist(), lengths, strict=True)]
        new = [cut._pages_of(row, n) for row, n in enumerate(lengths)]
        source, target = ([page for own in pages for page in own] for pages in (held, new))
        for layer, other in zip(self.layers, cut.layers, strict=True):
            for name, old in layer.tensors.items():
                made = other.tensors[name]
                if name.endswith(("slc", "cmp")):
                    most = min(old.shape[1], made.shape[1])  # of a page, or of a sequence
                    made[target, :most] = old[source, :most]
                else:
                    made.copy_(old[rows])
        cut.places.take(self.places, rows)
        return cut

    @torch.no_grad()
    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Empty these sequences, all by default, and free their pages."""
        before = self.lengths.clone()
        self.places.reset(rows)
        self._drop(before)
        if self.pages is not None:
            for row in range(self.shape.batch) if rows is None else rows:
                self.pages.release(row)

    def save(self, path: str | os.PathLike) -> None:
        """Write the cache to one file atomically."""
        state = {
            "format": FORMAT,
            "version": VERSION,
            "config": self.config.to_dict(),
            "shape": self.shape.to_dict(),
            "backend": self.backend,
            "layers": [layer.tensors for layer in self.layers],
            "places": self.places.state(),
            "pages": None if self.pages is None else self.pages.of,
            "step": self._step,
            "dropped": self._dropped,
        }
        write(state, Path(path))

    @classmethod
    @torch.no_grad()
    def load(cls, path: str | os.PathLike, device: torch.device | str | None = None) -> "NSACache":
        """Load the cache that `save` wrote. Raises ValueError for any other file."""
        state = read(path, FORMAT)
        config, shape = ModelConfig.from_dict(state["config"]), CacheShape.from_dict(state["shape"])
        sizes = {"page": shape.page, "pages": shape.pages, "slack": shape.slack}
        made = cls(
            config, shape.batch, shape.capacity, dtype=shape.dtype, device=device,
            backend=state["backend"], **sizes,
        )  # fmt: skip
        for layer, saved in zip(made.layers, state["layers"], strict=True):
            for name, x in layer.tensors.items():
                x.copy_(saved[name])
        made.places.restore(state["places"])
        if made.pages is not None:
            made.pages.restore(state["pages"])
        made._step.copy_(state["step"])
        made._dropped.copy_(state["dropped"])
        return made

    def record(self) -> dict[str, Any]:
        """Sizes, and keys read by each branch, in the last step and in total: for one KV head of
        one layer, summed over sequences. Waits for the device."""
        config, branches = self.config.nsa, self.shape.branches
        before, after = (keys_read(x.long(), config).sum(0) for x in self._step)
        total = self._dropped + keys_read(self.lengths.long(), config).sum(0)
        return {
            "bytes": self.bytes,
            "layers": self.config.layers,
            "batch": self.shape.batch,
            "capacity": self.shape.capacity,
            "page": self.shape.page,
            "lengths": self.lengths.tolist(),
            "last_step": by_branch(after - before, branches),
            "in_all": by_branch(total, branches),
        }

    @property
    def _back(self) -> int:
        """Number of newest tokens whose compressed keys may still have to be written."""
        return self.config.nsa.compress_block - 1

    def _copy(self, source: list[int], target: list[int]) -> None:
        if source:
            for layer in self.layers:
                layer.copy_pages(source, target)

    def _drop(self, before: Tensor) -> None:
        """Count the keys read by sequences whose lengths have changed from `before`."""
        config = self.config.nsa
        read, left = (keys_read(x.long(), config).sum(0) for x in (before, self.lengths))
        self._dropped += read - left

    def _pages_of(self, row: int, tokens: int) -> list[int]:
        if self.pages is None:
            return [row]
        return self.pages.of[row][: self.pages.count(tokens)]


def shape_of(config: ModelConfig, batch: int, capacity: int, **sizes: Any) -> CacheShape:
    """Sizes of one layer's cache. ValueError for sizes that do not fit and for dense attention."""
    if config.attention != "nsa":
        raise ValueError(
            f"attention={config.attention!r} has no cache here; attention='nsa' has, and without a "
            "cache a model reads the whole sequence for each new token"
        )
    branches = (config.force_branch,) if config.force_branch else BRANCHES
    given = {"branches": branches, "shared": config.shared_kv, **sizes}
    heads = config.kv_heads, config.head_dim, config.value_size
    return CacheShape(config.nsa, batch, capacity, *heads, **given)
