"""The sizes of Native Sparse Attention (arXiv 2502.11089), validated."""

import math
import operator
from dataclasses import dataclass, fields
from typing import Any

# Names that options take, here because this file loads without torch.
BRANCHES = ("cmp", "slc", "win")
PHI_KINDS = ("mean", "linear", "mlp")
GATE_KINDS = ("sigmoid", "linear", "softmax", "uniform")


@dataclass(frozen=True)
class NSAConfig:
    """Block sizes and key counts of each branch. The defaults are the paper's (section 4.1).

    Raises:
        TypeError: a size that is not an int.
        ValueError: sizes that do not fit together; the message has the nearest that do.
    """

    compress_block: int = 32  # l: tokens under one compressed key
    compress_stride: int = 16  # d: tokens between the starts of two compressed blocks
    select_block: int = 64  # l': tokens in one selectable block
    select_count: int = 16  # n: blocks a query attends to, forced ones included
    select_initial: int = 1  # forced: the first blocks of the sequence
    select_local: int = 2  # forced: the query's own block and those just before it
    window: int = 512  # w: newest tokens a query sees, its own included

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, as_int(field.name, getattr(self, field.name)))
        for name in ("compress_block", "compress_stride", "select_block", "select_count", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.select_initial < 0:
            raise ValueError(f"select_initial={self.select_initial} must be at least 0")
        if self.select_local < 1:
            raise ValueError(
                f"select_local={self.select_local} must be at least 1: "
                "a query's own block is always selected"
            )
        _check_multiple("select_block", self.select_block, self.compress_stride)
        _check_multiple(
            "compress_block", self.compress_block, self.compress_stride, most=self.select_block
        )
        if self.compress_block > self.select_block:
            raise ValueError(
                f"compress_block={self.compress_block} is larger than "
                f"select_block={self.select_block}; make select_block at least "
                f"{self.compress_block} or compress_block at most {self.select_block}"
            )
        forced = self.select_initial + self.select_local
        if self.select_count < forced:
            raise ValueError(
                f"select_count={self.select_count} has no room for select_initial="
                f"{self.select_initial} and select_local={self.select_local}; it must be "
                f"at least {forced}"
            )


def as_int(name: str, value: Any) -> int:
    """Convert `value`, also a NumPy integer, to int. TypeError for anything else, bool included."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}={value!r} is not an int")


def other_than(wanted: str, given: object) -> str:
    """Error message for a config that is not a `wanted`: its class, and the expected one."""
    kind = type(given)
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    if hasattr(given, "model_config"):  # of transformers
        held = "config.model_config()" + (".nsa" if wanted == "NSAConfig" else "")
    elif wanted == "ModelConfig":
        held = "model.config" if isinstance(given, NSAConfig) else ""
    else:
        held = "config.nsa" if isinstance(getattr(given, "nsa", None), NSAConfig) else ""
    article = "an" if wanted == "NSAConfig" else "a"
    text = f"must be {article} {wanted}, got a {home}{kind.__qualname__}"
    return f"{text}; {held} is one" if held else text


def _check_multiple(name: str, value: int, stride: int, most: float = math.inf) -> None:
    if value % stride:
        below = value // stride * stride
        legal = [str(n) for n in (below, below + stride) if 0 < n <= most]
        hint = f"nearest that are: {' and '.join(legal)}" if legal else f"{stride} would do"
        raise ValueError(f"{name}={value} is not a multiple of compress_stride={stride}; {hint}")
