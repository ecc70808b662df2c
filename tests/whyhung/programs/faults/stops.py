"""Steps that end the process or stop moving, each in another way, from FROM_STEP on; and steps that
take long and do not hang, which a timeout alone would call stopped."""

import ctypes
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import workbook  # noqa: F401  adds the backend `sequential`
from faults.small import FROM_STEP, Small, TinyNSA

LONG_S = 3600.0  # longer than any trial: ended by its supervisor, or with it
ROUNDS = 2**31 - 1  # of a hash: about an hour in C without the GIL


class AtForward(Small):
    """A fault's `happen` comes before the forward, from FROM_STEP on."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        if step >= FROM_STEP:
            self.happen()
        return super().forward(step, inputs, targets)


class AtFetch(Small):
    """A fault's `happen` comes before the data, from FROM_STEP on."""

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        if step >= FROM_STEP:
            self.happen()
        return super().fetch(step)


def _calls(base: type[Small], function: Callable, *arguments: Any, **options: Any) -> type[Small]:
    """The fault whose `happen` is this one call."""
    happen = staticmethod(partial(function, *arguments, **options))
    return type(base.__name__, (base,), {"happen": happen})


Killed = _calls(AtForward, signal.raise_signal, signal.SIGKILL)  # no word, no traceback
BadPointer = _calls(AtForward, ctypes.string_at, 1)
Aborts = _calls(AtForward, ctypes.CDLL(None).abort)
Leaves = _calls(AtForward, sys.exit, 3)
LeavesSilently = _calls(AtForward, os._exit, 0)
TooLarge = _calls(AtForward, torch.empty, 2**55, dtype=torch.uint8)
NativeLoop = _calls(AtForward, hashlib.pbkdf2_hmac, "sha256", b"key", b"salt", ROUNDS)
SleepingLoader = _calls(AtFetch, time.sleep, LONG_S)


class Raises(AtForward):
    """An exception of a library, with a message of two lines."""

    def happen(self) -> None:
        raise KeyError("the shard 'part-00003' is not in the index\nof 3 shards")


class Overwritten(Small):
    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model[0](inputs).exp()
        loss = (self.model[2:](hidden) - targets).square().mean()
        if step == FROM_STEP:
            hidden.add_(1)  # autograd counts its versions
        return loss


class _Filtered(torch.autograd.Function):
    """The same tensor, with a backward that never ends."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        count = 0
        while count >= 0:  # always
            count += 1


class LoopInBackward(Small):
    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        if step >= FROM_STEP:
            inputs = _Filtered.apply(inputs.requires_grad_())
        return super().forward(step, inputs, targets)


class LockedCall(AtFetch):
    def happen(self) -> None:
        mutex = ctypes.create_string_buffer(128)  # zeros are a mutex that is free
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)


class Slow(TinyNSA):
    config = TinyNSA.config.with_(backend="sequential")


class Recompiles(Small):
    def prepare(self) -> None:
        torch._dynamo.config.recompile_limit = 10**6
        self.compiled = torch.compile(_scaled, backend="eager", dynamic=False)

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().fetch(step)
        return self.compiled(inputs, step + 2), targets


def _scaled(inputs: Tensor, number: int) -> Tensor:
    return inputs * number / (1 + number)
