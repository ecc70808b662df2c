"""Sizes at which decoding is measured, and the byte counts estimated before anything runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from nsa.attention import decode
from nsa.attention.places import CacheShape
from nsa.blocks import count_compressed
from nsa.config import NSAConfig
from nsa.reference.nsa import BRANCHES
from nsa.spelling import choice
from workbook.lab.measure.shapes import DTYPES, count
from workbook.lab.training import check_whole
from workbook.runs.looks import length

# arXiv 2502.11089, Table 4: tokens that a step of NSA has to load, by tokens of dense attention.
PAPER = {8192: 2048, 16384: 2560, 32768: 3584, 65536: 5632}
PLAIN = "contiguous"


@dataclass(frozen=True)
class Cell:
    """One step: a new token in each of `batch` sequences, the newest of the `tokens` that it sees.

    Raises ValueError for inconsistent sizes.
    """

    batch: int  # B
    tokens: int  # of a sequence, the new one included
    heads: int = 64  # HQ
    kv_heads: int = 4  # HKV
    dim: int = 128  # D = DV
    dtype: str = "bf16"
    shared_kv: bool = False  # one k and v for the three branches
    config: NSAConfig = field(default_factory=NSAConfig)
    seed: int = 1337

    def __post_init__(self) -> None:
        choice("dtype", self.dtype, DTYPES)
        check_whole(self, dict.fromkeys(("batch", "tokens", "heads", "kv_heads", "dim"), 1))
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        least = self.config.compress_block + 1
        if self.tokens < least:
            raise ValueError(f"tokens={self.tokens} are too few to compress; at least {least}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def key_bytes(self) -> int:
        """Bytes of one key and its value, over all KV heads and sequences."""
        return self.batch * self.kv_heads * 2 * self.dim * self.torch_dtype.itemsize

    @property
    def keys(self) -> dict[str, int]:
        """Number of keys that one KV head of one sequence reads, by branch, and "dense": all.

        The newest token, at position t = T - 1, reads (T - l) // d + 1 compressed keys, once for
        attention and scores alike; min(n, t // l' + 1) blocks, its own up to itself; min(w, T).
        """
        config, last = self.config, self.tokens - 1
        others = min(config.select_count, last // config.select_block + 1) - 1
        return {
            "cmp": count_compressed(self.tokens, config),
            "slc": others * config.select_block + last % config.select_block + 1,
            "win": min(config.window, self.tokens),
            "dense": self.tokens,
        }

    @property
    def nsa_keys(self) -> int:
        """Number of keys of all three branches; a key that two of them read counts twice."""
        return sum(self.keys[branch] for branch in BRANCHES)

    def bytes_read(self, operation: str = "nsa") -> int:
        """Bytes of keys and values that one step must load, for "nsa" or "dense"."""
        return self.key_bytes * (self.nsa_keys if operation == "nsa" else self.tokens)

    def shape(self, page: int | None = None) -> CacheShape:
        """Shape of a layer's cache that this step fills."""
        sizes = self.batch, self.tokens, self.kv_heads, self.dim, self.dim, self.torch_dtype
        return CacheShape(self.config, *sizes, shared=self.shared_kv, page=page)

    def cache_bytes(self, page: int | None = None) -> int:
        """Estimated bytes of a layer's cache with its page table and lengths."""
        shape = self.shape(page)
        return shape.bytes + shape.places_bytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of a cache of dense attention."""
        return self.key_bytes * self.tokens

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Cell":
        return cls(**{**values, "config": NSAConfig(**values["config"])})

    def __str__(self) -> str:
        return f"{self.batch} x {length(self.tokens)}"


def cells_from(sizes: Sequence[str], **common: Any) -> list[Cell]:
    """Make a cell for each of `sizes`, "sequences x tokens" as in "32x64k"; else ValueError."""
    if not sizes:
        raise ValueError("no sizes; write some as 32x64k: sequences x cached tokens")
    found = []
    for text in sizes:
        parts = re.fullmatch(r"\s*(\d+)\s*x\s*(\w+)\s*", text)
        if not parts:
            raise ValueError(f"{text!r} is no size; write 32x64k: sequences x cached tokens")
        found.append(Cell(int(parts[1]), count(parts[2]), **common))
    return list(dict.fromkeys(found))


COMMON = ("heads", "kv_heads", "dim", "dtype", "shared_kv", "seed")


def cells_of(values: Mapping[str, Any]) -> list[Cell]:
    """Cells of the notebook's parameters."""
    return cells_from(values["sizes"], **{name: values[name] for name in COMMON})


def layouts(pages: Sequence[int]) -> dict[str, int | None]:
    """Cache layouts by name: {"contiguous": None, "pages of 64": 64, ...}."""
    return {PLAIN: None} | {f"pages of {page}": page for page in pages}


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise ValueError for notebook parameters that cannot be run."""
    for cell in cells_of(values):
        for page in layouts(values["pages"]).values():
            cell.shape(page)
    for name in values["backends"]:
        choice("backend", name, decode.names())
    if wrong := [path for path in values["peers"] if ":" not in path]:
        raise ValueError(f"peers={wrong[0]!r} is not of the form import.path:function")
