"""Settings of CUDA's caching allocator in PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from nsa.spelling import nearest

MIB = 2**20
BLOCK = 512  # bytes; block sizes are multiples of it without roundup_power2_divisions
# Settings of host memory, locks and streams, which have no effect here.
ELSEWHERE = (
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
)


@dataclass(frozen=True)
class Settings:
    """Settings of PYTORCH_CUDA_ALLOC_CONF, in bytes; `parse` reads them from its text."""

    large_segment: int = 20 * MIB  # for requests above 1 and below 10 MiB
    max_split: float = math.inf  # blocks of at least this size are never split
    max_rounding: int = 20 * MIB  # maximum excess of such a block over the request
    roundup: tuple[int, ...] = ()  # parts of a power of 2, for sizes up to 2 MiB, 4, 8, ... 64 GiB
    threshold: float = 0.0  # share of the allowed memory above which cached blocks are collected
    expandable: bool = False  # one segment per pool and stream, with pages mapped as needed
    fraction: float = 1.0  # share of the GPU's memory that the process may use

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Parse `name:value,name:[size:value,>:value]` as torch does.

        ValueError for an unknown name or an invalid value (naming the nearest) and for settings not
        modelled: `backend:cudaMallocAsync` and `throw_on_cudamalloc_oom:True`.
        """
        known = (*_READ, *ELSEWHERE, "large_segment_size_mb", "backend", "throw_on_cudamalloc_oom")
        given: dict[str, str] = {}
        for part in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)):
            name, colon, value = part.partition(":")
            if not part:
                continue
            if name.partition("=")[0] not in known:
                raise ValueError(f"the allocator has no setting {name!r}; {nearest(name, known)}")
            if not colon or not value:
                raise ValueError(f"{part!r} has no value; write it as max_split_size_mb:64")
            given[name] = value
        if given.pop("backend", "native") != "native":
            raise ValueError("of the allocator's backends only native is modelled")
        if _switch("throw_on_cudamalloc_oom", given.pop("throw_on_cudamalloc_oom", "False")):
            raise ValueError("throw_on_cudamalloc_oom:True is not modelled; leave it out")
        segment = _mib("large_segment_size_mb", given.pop("large_segment_size_mb", "20"), 11 * MIB)
        found = {"large_segment": segment, "max_rounding": segment}
        for name, value in given.items():
            if name in _READ:
                owner, read = _READ[name]
                found[owner] = read(name, value, *([segment] if read is _mib else []))
        return cls(**found)

    def rounded(self, size: int) -> int:
        """Return the bytes of the block needed for a request of `size` bytes."""
        if self.roundup and size >= BLOCK:
            power = size.bit_length() - 1
            parts = self.roundup[min(max(power - 20, 0), len(self.roundup) - 1)]
            if parts > 1 and size > BLOCK * parts:
                return -(-size // ((1 << power) // parts)) * ((1 << power) // parts)
        return -(-max(size, 1) // BLOCK) * BLOCK


def _mib(name: str, value: str, least: int) -> int:
    if not value.isdecimal():
        raise ValueError(f"{name}:{value} is no whole number of MiB; write {name}:64")
    if int(value) * MIB < least:
        raise ValueError(f"{name}:{value} is too small; the nearest is {least // MIB}")
    return int(value) * MIB


def _switch(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{name}:{value} is neither True nor False")
    return value == "True"


def _share(name: str, value: str) -> float:
    whole = name == "per_process_memory_fraction"  # which may be 0 or 1
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not (0 <= share <= 1 if whole else 0 < share < 1):
        bounds = "from 0 to 1" if whole else "between 0 and 1, and neither"
        raise ValueError(f"{name}:{value} must be {bounds}, as {name}:0.8")
    return share


def _parts(name: str, value: str) -> tuple[int, ...]:
    """Parse one number for all sizes, or `[64:8,256:4,>:1]`: parts by size in MiB."""

    def power(text: str, least: int) -> int:
        number = int(text) if text.isdecimal() else -1
        if number < least or number & (number - 1):
            below = 1 << max(number, 1).bit_length() - 1
            near = f"the nearest are {below} and {2 * below}"
            raise ValueError(f"{name}: {text} is no power of 2; {near}")
        return number

    if not value.startswith("["):
        return (power(value, 1),) * 16
    parts, last = [0] * 16, -1
    for pair in value.strip("[]").split(","):
        size, _, number = pair.partition(":")
        count = power(number, 0)
        if size == ">":
            parts[last + 1 :] = [count] * (15 - last)
        else:
            at = min(power(size, 1).bit_length() - 1, 15)
            parts[0 if last < 0 else at : at + 1] = [count] * (at + 1 if last < 0 else 1)
            last = at
    return tuple(parts)


_READ: dict[str, tuple[str, Callable]] = {
    "max_split_size_mb": ("max_split", _mib),
    "max_non_split_rounding_mb": ("max_rounding", _mib),
    "roundup_power2_divisions": ("roundup", _parts),
    "garbage_collection_threshold": ("threshold", _share),
    "per_process_memory_fraction": ("fraction", _share),
    "expandable_segments": ("expandable", _switch),
}
