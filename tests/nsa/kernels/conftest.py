"""Corrections of what interpreters do otherwise than a GPU, for all kernels' tests."""

from functools import partial

import gluon_emulator
import numpy as np
import pytest
import torch
import triton.language as tl
from backend_calls import DEVICE
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from nsa.kernels.hopper import launches


@pytest.fixture(autouse=True)
def bfloat16_as_on_a_gpu(monkeypatch):
    """Rounds to bfloat16 as a GPU does, and multiplies values in tl.dot.

    Interpreted, a bfloat16 tensor is held as uint16: tl.dot would multiply those, and a cast from
    fp32 would drop the bits that do not fit.
    """
    if DEVICE == "cuda":
        return
    plain_dot, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return plain_dot(self, widened(a), widened(b), *rest)

    def cast_impl(self, x, kind):
        if (x.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return plain_cast(self, x, kind)
        rounded = torch.tensor(x.data).to(torch.bfloat16).view(torch.uint16)
        return TensorHandle(rounded.numpy(), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)


@pytest.fixture
def on_device():
    """Make tensors on the device under test."""
    with torch.device(DEVICE):
        yield


@pytest.fixture
def run(monkeypatch):
    """Makes launches run, changed or not; on a GPU as they are."""

    def emulating(seed: int = 0, change: gluon_emulator.Change = str) -> None:
        if DEVICE == "cuda":
            return
        monkeypatch.setattr(launches, "compiles_for", lambda x: True)
        run = partial(gluon_emulator.run, seed=seed, change=change)
        monkeypatch.setattr(
            launches, "launch", lambda kernel, grid, *a, **b: run(kernel, grid, *a, **b)
        )

    return emulating
