"""Shapes for attention measurements: sizes, dtype, kind of queries, and their names."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import torch

from nsa.config import NSAConfig
from nsa.spelling import choice, nearest, pair
from workbook.lab.training import check_whole

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CAPTURED = Path(__file__).with_name("captured.json")  # fitted to trained models, see `captured`
QUERIES = ("random", "correlated", "captured")
SIZES = ("tokens", "heads", "kv_heads", "dim", "value_dim", "batch")
TINY_CONFIG = NSAConfig(
    compress_block=8, compress_stride=4, select_block=8, select_count=4, window=16
)


@dataclass(frozen=True)
class Shape:
    """One shape; `queries` and `shared_kv` as in `workbook.lab.measure.attention_inputs.draw`.

    ValueError for a size below 1, heads not divisible by kv_heads, or an unknown name.
    """

    tokens: int
    heads: int = 64
    kv_heads: int = 4
    dim: int = 128
    value_dim: int = 128
    batch: int = 1
    dtype: str = "bf16"
    queries: str = "random"
    shared_kv: bool = True
    seed: int = 1337
    config: NSAConfig = field(default_factory=NSAConfig)

    def __post_init__(self) -> None:
        check_whole(self, dict.fromkeys(SIZES, 1))
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        for name, known in (("dtype", DTYPES), ("queries", QUERIES)):
            choice(name, getattr(self, name), known)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def group(self) -> int:
        """G: query heads that share one KV head."""
        return self.heads // self.kv_heads

    def to_dict(self) -> dict:
        """Return plain, JSON-compatible values; `from_dict` restores an equal shape."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "Shape":
        return cls(**{**values, "config": NSAConfig(**values["config"])})

    def __str__(self) -> str:
        dims = f"{self.dim}" if self.dim == self.value_dim else f"{self.dim}/{self.value_dim}"
        sizes = f"T={self.tokens} HQ={self.heads} HKV={self.kv_heads} D={dims}"
        extra = f" B={self.batch}" * (self.batch != 1) + " own k, v a branch" * (not self.shared_kv)
        return f"{sizes}{extra} {self.dtype} {self.queries} queries"


NAMED = {
    "main": [Shape(t) for t in (8192, 32768, 65536, 131072)],
    "small": [Shape(2048, heads=12, dim=d, value_dim=d) for d in (64, 128)],
    "g4": [Shape(32768, kv_heads=16)],
    "tiny": [Shape(t, 4, 1, 16, 16, dtype="fp32", config=TINY_CONFIG) for t in (32, 64)],
}


def shapes_from(
    texts: Sequence[str], tokens: Sequence[int] = (), queries: Sequence[str] = ("random",)
) -> list[Shape]:
    """Parse shapes from names in NAMED and lists such as "tokens=4k,heads=32,dtype=fp16".

    `tokens` replaces the lengths of a named shape; each shape is combined with each of `queries`,
    unless its list names one. ValueError for unknown names, naming the nearest.
    """
    for given, what, known in ((texts, "shapes", NAMED), (queries, "kinds of queries", QUERIES)):
        if not given:
            raise ValueError(f"no {what}; known are {', '.join(known)}")
    return list(dict.fromkeys(s for text in texts for s in _of(text, tokens, queries)))


def _of(text: str, tokens: Sequence[int], queries: Sequence[str]) -> list[Shape]:
    if text in NAMED:
        known = [replace(s, tokens=t) for t in tokens for s in NAMED[text]] or NAMED[text]
        return [replace(s, queries=kind) for kind in queries for s in known]
    if "=" not in text:
        hint = nearest(text, NAMED)
        raise ValueError(
            f"no shapes are called {text!r}; {hint}, or write tokens=4k,heads=32,kv_heads=8"
        )
    values, config = {}, {}
    names, sizes = ([f.name for f in fields(kind)] for kind in (Shape, NSAConfig))
    names.remove("config")
    for part in text.split(","):
        name, value = pair(part, "heads=32")
        if name not in names + sizes:
            raise ValueError(f"{part!r} in {text!r} names no size; {nearest(name, names + sizes)}")
        (config if name in sizes else values)[name] = _value(name, value)
    if "dim" in values:
        values.setdefault("value_dim", values["dim"])
    if "tokens" not in values and not tokens:
        raise ValueError(f"{text!r} needs tokens=..., as in tokens=8k,{text}")
    each = {"tokens": tokens, "queries": queries}
    each |= {name: [values.pop(name)] for name in each if name in values}
    one = partial(Shape, **values, config=NSAConfig(**config))
    return [one(tokens=t, queries=kind) for kind in each["queries"] for t in each["tokens"]]


def _value(name: str, text: str) -> int | bool | str:
    if name in ("dtype", "queries"):
        return text
    if name == "shared_kv":
        if text.lower() not in ("true", "false"):
            raise ValueError(f"shared_kv={text} must be true or false")
        return text.lower() == "true"
    return 0 if text == "0" else count(text)  # the config class checks which sizes may be 0


def count(text: str) -> int:
    """Parse 8k as 8192, 1m as 1048576, 2048 as 2048; ValueError for anything else."""
    number, scale = text.strip().lower(), 1
    if number[-1:] in ("k", "m"):
        number, scale = number[:-1], 1024 if number[-1] == "k" else 1024**2
    if not (number.isascii() and number.isdigit()) or int(number) < 1:
        raise ValueError(f"{text!r} is no number of tokens; write 2048, 8k or 1m")
    return int(number) * scale
