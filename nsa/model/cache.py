"""What a model keeps of its sequences while it generates: a cache a layer, lengths for all."""

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
# What a cache does not depend on, beside what may change between runs.
OTHER = {"vocab", "mlp_hidden", "gate", "gate_temperature", "gate_init", "stopgrad_gates", "sinks"}


class NSACache:
    """Keys and values of B sequences in all layers of a model; see `LayerCache` for its tensors.

    Contiguous, each sequence has room for `capacity` tokens from the start. Paged (`page` tokens
    each, a multiple of the selection block), sequences take pages of a pool when they grow, and
    `reorder` lets them share what they have in common. `lengths` [B] int32 stands on the device;
    the host knows what no length exceeds, so that nothing in a step waits for the device.

    Args:
        batch, capacity: B, and the tokens a sequence may have; rounded up to whole pages.
        dtype: of keys and values: the model's, or autocast's.
        pages: of the pool; None: enough for every sequence to be full.
        slack: the most new tokens of a kernel's call, and the most that a crop takes back.
        backend: who decodes, see `nsa.attention.decode.nsa_decode`.

    Raises:
        TypeError: a config that is no ModelConfig.
        ValueError: sizes that do not fit, dense attention, a backend that is none.
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
        self.held = [0] * self.shape.batch  # what no length exceeds, as far as the host knows
        angles = {"device": device, "scale": config.rope_scale}
        self.tables = rotary_tables(
            self.shape.capacity, config.head_dim, config.rope_base, **angles
        )
        self._step = torch.zeros(2, self.shape.batch, dtype=torch.int32, device=device)
        self._dropped = torch.zeros(3, dtype=torch.int64, device=device)

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Tokens that each sequence has."""
        return self.places.lengths

    @property
    def longest(self) -> int:
        """What no length exceeds."""
        return max(self.held)

    @property
    def device(self) -> torch.device:
        return self.lengths.device

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, as `bytes_for` foretells."""
        shared = (self.places.table, self.lengths, self.places.newest, *self.tables)
        shared += (self._step, self._dropped)
        own = sum(x.numel() * x.element_size() for x in shared)
        return own + sum(layer.bytes for layer in self.layers)

    @staticmethod
    def bytes_for(config: ModelConfig, batch: int, capacity: int, **sizes: Any) -> int:
        """Bytes of such a cache, before there is one: dtype, page, pages and slack as in it."""
        shape = shape_of(config, batch, capacity, **{"dtype": torch.float32} | sizes)
        angles = 2 * shape.capacity * (config.head_dim // 2) * 4
        counters = 2 * shape.batch * 4 + 3 * 8
        return config.layers * shape.bytes + shape.places_bytes + angles + counters

    def check(
        self, config: ModelConfig, tokens: Tensor, counts: Tensor | Sequence[int] | None = None
    ) -> tuple[Tensor | None, int | list[int]]:
        """ValueError unless tokens [B, N] of a model of that config, counts[b] of them real, may
        come into this cache. (counts on its device, the most that the host knows them to be)."""
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
        if counts.shape != (self.shape.batch,) or counts.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"counts must be int32 [B] = ({self.shape.batch},), got {tuple(counts.shape)} of "
                f"{counts.dtype}"
            )
        if counts.device.type != "cpu":
            return counts, tokens.shape[1]
        known = counts.tolist()
        if min(known) < 0 or max(known) > tokens.shape[1]:
            raise ValueError(f"counts={known} must be within 0..{tokens.shape[1]}, the new tokens")
        return counts.int().to(self.device), known

    def reserve(self, new: int | Sequence[int]) -> None:
        """Makes sure of room for `new` more tokens, of all sequences or of each.

        ValueError, and nothing changed, where a sequence or the pool of pages would be too full. It
        waits for the device only where the host's bound says so.
        """
        added = self._each(new)
        full, wanted = self.shape.capacity, [h + n for h, n in zip(self.held, added, strict=True)]
        if max(wanted) > full:
            self._look()
            wanted = [h + n for h, n in zip(self.held, added, strict=True)]
        for row, tokens in enumerate(wanted):
            if tokens > full:
                raise ValueError(
                    f"the cache is full: sequence {row} has {self.held[row]} of {full} tokens and "
                    f"{added[row]} more do not fit; NSACache(..., capacity={tokens}) would do, or "
                    "crop or reset it"
                )
        if self.pages is not None:
            self.pages.reserve(wanted)

    def advance(self, new: int, counts: Tensor | None = None) -> None:
        """All layers have `new` more tokens of each sequence, or counts [B] of them: the device's
        part, which a CUDA graph replays; `count` is the host's."""
        self._step[0].copy_(self.lengths)
        self.places.advance(new, counts)
        self._step[1].copy_(self.lengths)

    def count(self, new: int | Sequence[int]) -> None:
        """What the host knows of an `advance`: at most so many tokens more."""
        full = self.shape.capacity
        self.held = [min(h + n, full) for h, n in zip(self.held, self._each(new), strict=True)]
        self.places.longest = self.longest

    def rotary(self, new: int) -> Rotary:
        """The angles of the next `new` tokens of each sequence."""
        return Rotary(*self.tables, next_positions(self.lengths, self.shape.capacity, new))

    @torch.no_grad()
    def crop(self, lengths: int | Sequence[int] | Tensor, *, check: bool = True) -> None:
        """Forgets what each sequence has beyond `lengths`, one for all or [B], as `Places.crop`.

        Pages that a sequence no longer needs are free again; of shared pages that it will write
        into it gets copies. Without `check` nothing waits for the device, unless pages are shared.

        Raises ValueError, and changes nothing, for lengths that cannot be had or a pool too full.
        """
        before, newest = self.lengths.clone(), self.places.newest.clone()
        self.places.crop(lengths, check=check)
        try:
            if check or (self.pages is not None and self.pages.shared):
                self._own_pages(self.lengths.tolist())
        except ValueError:
            self.lengths.copy_(before)
            self.places.newest.copy_(newest)
            self._look()
            raise
        self._drop(before)

    @torch.no_grad()
    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Sequence b becomes what sequence index[b] was, as beam search needs.

        Contiguous, sequences that change are copied. Paged, they share the pages that are complete,
        and of the last ones, which are still written to, each has a copy of its own at once. Waits
        for the device. ValueError, and nothing changed, for other indices or a pool too full.
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
        self._look()
        self._drop(before)

    @torch.no_grad()
    def select(self, rows: Sequence[int] | Tensor, capacity: int | None = None) -> "NSACache":
        """A new cache with copies of those sequences alone, in that order; a sequence may come
        twice. `capacity` of more tokens makes room. Its counters begin with what its sequences
        read. Waits for the device. ValueError where the sequences do not fit."""
        rows = self.places.index("rows", rows)
        cut = self._like(len(rows), capacity or self.shape.capacity)
        lengths = self.lengths[rows].tolist()
        cut.reserve(lengths)
        held = [self._pages_of(row, n) for row, n in zip(rows.tolist(), lengths, strict=True)]
        new = [cut._pages_of(row, n) for row, n in enumerate(lengths)]
        source, target = ([page for own in pages for page in own] for pages in (held, new))
        for layer, other in zip(self.layers, cut.layers, strict=True):
            for name in self.shape.tensors():
                old, made = getattr(layer, name), getattr(other, name)
                if name.endswith(("slc", "cmp")):
                    most = min(old.shape[1], made.shape[1])  # of a page, or of a sequence
                    made[target, :most] = old[source, :most]
                else:
                    made.copy_(old[rows])
        cut.places.take(self.places, rows)
        cut._look()
        return cut

    @torch.no_grad()
    def reset(self, rows: Sequence[int] | None = None) -> None:
        """Those sequences have no tokens, by default none has; their pages are free again."""
        before = self.lengths.clone()
        self.places.reset(rows)
        self._drop(before)
        for row in range(self.shape.batch) if rows is None else rows:
            self.held[row] = 0
            if self.pages is not None:
                self.pages.release(row)
        self.places.longest = self.longest

    def save(self, path: str | os.PathLike) -> None:
        """Writes all of it to one file, which appears whole or not at all."""
        state = {
            "format": FORMAT,
            "version": VERSION,
            "config": self.config.to_dict(),
            "shape": self.shape.to_dict(),
            "backend": self.backend,
            "layers": [
                {name: getattr(layer, name) for name in self.shape.tensors()}
                for layer in self.layers
            ],
            "places": self.places.state(),
            "pages": None if self.pages is None else self.pages.of,
            "step": self._step,
            "dropped": self._dropped,
        }
        write(state, Path(path))

    @classmethod
    @torch.no_grad()
    def load(cls, path: str | os.PathLike, device: torch.device | str | None = None) -> "NSACache":
        """The cache that `save` wrote. Raises ValueError for a file of something else."""
        state = read(path, FORMAT)
        config, shape = ModelConfig.from_dict(state["config"]), CacheShape.from_dict(state["shape"])
        sizes = {"page": shape.page, "pages": shape.pages, "slack": shape.slack}
        made = cls(
            config, shape.batch, shape.capacity, dtype=shape.dtype, device=device,
            backend=state["backend"], **sizes,
        )  # fmt: skip
        for layer, saved in zip(made.layers, state["layers"], strict=True):
            for name in shape.tensors():
                getattr(layer, name).copy_(saved[name])
        made.places.restore(state["places"])
        if made.pages is not None:
            made.pages.restore(state["pages"])
        made._step.copy_(state["step"])
        made._dropped.copy_(state["dropped"])
        made._look()
        return made

    def record(self) -> dict[str, Any]:
        """Sizes, and the keys that each branch has read, in the last step and in all: of one KV
        head of one layer, of all sequences together. Waits for the device."""
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
        """Of the newest so many tokens something is still to be written: their compressed keys."""
        return self.config.nsa.compress_block - 1

    def _each(self, new: int | Sequence[int]) -> list[int]:
        return [new] * self.shape.batch if isinstance(new, int) else list(new)

    def _look(self) -> None:
        """Reads the lengths, so that the host's bounds are exact."""
        self.held = self.lengths.tolist()
        self.places.longest = self.longest

    def _own_pages(self, lengths: list[int]) -> None:
        if self.pages is not None:
            same = range(self.shape.batch)
            self._copy(*self.pages.reorder(same, lengths, self._back))
        self.held = lengths
        self.places.longest = self.longest

    def _copy(self, source: list[int], target: list[int]) -> None:
        if source:
            for layer in self.layers:
                layer.copy_pages(torch.tensor(source), torch.tensor(target))

    def _drop(self, before: Tensor) -> None:
        """Counts what sequences read whose lengths were `before` and are now others."""
        config = self.config.nsa
        read, left = (keys_read(x.long(), config).sum(0) for x in (before, self.lengths))
        self._dropped += read - left

    def _pages_of(self, row: int, tokens: int) -> list[int]:
        if self.pages is None:
            return [row]
        return self.pages.of[row][: self.pages.count(tokens)]

    def _like(self, batch: int, capacity: int) -> "NSACache":
        sizes = {"dtype": self.shape.dtype, "device": self.device, "slack": self.shape.slack}
        sizes |= {"page": self.shape.page, "backend": self.backend}
        return NSACache(self.config, batch, capacity, **sizes)


def shape_of(config: ModelConfig, batch: int, capacity: int, **sizes: Any) -> CacheShape:
    """The sizes of one layer's cache. ValueError for sizes that do not fit, and dense attention."""
    if config.attention != "nsa":
        raise ValueError(
            f"attention={config.attention!r} has no cache here; attention='nsa' has, and without a "
            "cache a model reads the whole sequence for each new token"
        )
    branches = (config.force_branch,) if config.force_branch else BRANCHES
    given = {"branches": branches, "shared": config.shared_kv, **sizes}
    heads = config.kv_heads, config.head_dim, config.value_size
    return CacheShape(config.nsa, batch, capacity, *heads, **given)
