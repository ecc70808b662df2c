"""What all operators need: a config as plain numbers, their sequences, their GPU."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache, wraps

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.kernels.sequences import Sequences, dense, packed

SIZES = tuple(field.name for field in fields(NSAConfig))


def on_its_device(function: Callable) -> Callable:
    """`function` with its first tensor's GPU as the current one: that is where Triton launches."""

    @wraps(function)
    def guarded(x, *args, **kwargs):
        if not x.is_cuda or x.device.index == torch.cuda.current_device():
            return function(x, *args, **kwargs)
        with torch.cuda.device(x.device):
            return function(x, *args, **kwargs)

    return guarded


def sizes_of(config: NSAConfig) -> list[int]:
    """The config as an operator takes it."""
    return [getattr(config, name) for name in SIZES]


def sequences_of(
    tokens: int, cu_seqlens: Tensor | None, batch: int, sizes: Sequence[int]
) -> Sequences:
    """The sequences of a call on a flat axis of `tokens`: packed, or `batch` of one length."""
    if cu_seqlens is not None:
        return packed(cu_seqlens, tokens, _config(tuple(sizes)))
    if isinstance(tokens, int):
        return _dense(batch, tokens // batch, tuple(sizes))
    return dense(batch, tokens // batch, NSAConfig(*sizes))  # while torch traces, no number


@lru_cache(maxsize=256)
def _config(sizes: tuple[int, ...]) -> NSAConfig:
    return NSAConfig(*sizes)


@lru_cache(maxsize=256)
def _dense(batch: int, length: int, sizes: tuple[int, ...]) -> Sequences:
    """Of each shape once: a short call feels the host's work."""
    return dense(batch, length, _config(sizes))


def contiguous(x: Tensor) -> Tensor:
    """x with a contiguous last dimension, which is what kernels take for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()
