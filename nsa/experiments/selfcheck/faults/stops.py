"""Steps that end the process or stop moving, each in another way, from FROM_STEP on; and steps that
take long and do not hang, which a timeout alone would call stopped."""

import ctypes
import hashlib
import os
import queue
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.experiments.selfcheck.faults.small import FROM_STEP, MIB, Small, TinyNSA

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
Stopped = _calls(AtForward, signal.raise_signal, signal.SIGSTOP)
BadPointer = _calls(AtForward, ctypes.string_at, 1)
Aborts = _calls(AtForward, ctypes.CDLL(None).abort)
Leaves = _calls(AtForward, sys.exit, 3)
LeavesSilently = _calls(AtForward, os._exit, 0)
TooLarge = _calls(AtForward, torch.empty, 2**55, dtype=torch.uint8)
# It backtracks 2^40 times, in C code that keeps the GIL.
Expression = _calls(AtForward, re.match, r"(a?){40}a{40}", "a" * 40)
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


class OutOfAddresses(AtForward):
    """The limit is the process's own, so that the host is not used up."""

    def happen(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 256 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        held = []
        while True:
            held.append(torch.empty(32 * MIB, dtype=torch.uint8))


class _Filtered(torch.autograd.Function):
    """The same tensor, with a backward that never ends."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        _filter()


class LoopInBackward(Small):
    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        if step >= FROM_STEP:
            inputs = _Filtered.apply(inputs.requires_grad_())
        return super().forward(step, inputs, targets)


class DeafLoop(AtFetch):
    def happen(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _filter()


class LockedCall(AtFetch):
    def happen(self) -> None:
        mutex = ctypes.create_string_buffer(128)  # zeros are a mutex that is free
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)


class LockTwice(AtForward):
    def happen(self) -> None:
        lock = threading.Lock()
        with lock:
            lock.acquire()


class DeadProducer(Small):
    def prepare(self) -> None:
        self.batches: queue.Queue = queue.Queue()
        threading.Thread(target=self._produce, daemon=True).start()

    def _produce(self) -> None:
        for step in range(FROM_STEP):
            self.batches.put(Small.fetch(self, step))

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        return self.batches.get()


class EmptyPipe(AtFetch):
    def happen(self) -> None:
        os.read(os.pipe()[0], 1)


class Slow(TinyNSA):
    config = TinyNSA.config.with_(backend="sequential")


class SlowLoader(Small):
    """Each batch takes settings["sleep_s"] to come."""

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.settings["sleep_s"])
        return super().fetch(step)


class Recompiles(Small):
    def prepare(self) -> None:
        torch._dynamo.config.recompile_limit = 10**6
        self.compiled = torch.compile(_scaled, backend="eager", dynamic=False)

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().fetch(step)
        return self.compiled(inputs, step + 2), targets


class CompilesOnce(Small):
    def prepare(self) -> None:
        self.called = torch.compile(self.model, backend="aot_eager", dynamic=False)


class LongCall(Small):
    """Healthy: one call into C, without the GIL, for settings["call_s"] seconds in one step."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        if step == 1:
            began = time.perf_counter()  # not CPU time: others may want the core as well
            _work(300_000)
            rate = 300_000 / (time.perf_counter() - began)
            _work(int(rate * self.settings["call_s"]))
        return super().forward(step, inputs, targets)


class LateStart(Small):
    """Healthy: nothing is told of progress for the first settings["start_s"] seconds."""

    def prepare(self) -> None:
        time.sleep(self.settings["start_s"])


class Stranger:
    """Healthy: a step of somebody who has never heard of progress, and has no `model` to show."""

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._net = torch.nn.Linear(8, 1)

    def step(self, step: int) -> Tensor:
        loss = self._net(torch.ones(4, 8)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in self._net.parameters():
                parameter -= 1e-3 * parameter.grad
                parameter.grad = None
        return loss.detach()


def _scaled(inputs: Tensor, number: int) -> Tensor:
    return inputs * number / (1 + number)


def _work(rounds: int) -> None:
    hashlib.pbkdf2_hmac("sha256", b"key", b"salt", rounds)


def _filter() -> None:
    count = 0
    while count >= 0:  # always
        count += 1
