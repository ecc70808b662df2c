"""Steps that stop moving, each in another way, from FROM_STEP on."""

import ctypes
import hashlib
import os
import queue
import re
import signal
import threading
import time

import torch
from torch import Tensor

from nsa.experiments.selfcheck.faults.small import FROM_STEP, Small

LONG_S = 3600.0  # longer than any trial: ended by its supervisor, or with it
ROUNDS = 2**31 - 1  # of a hash: about an hour in C without the GIL


class _Backward(torch.autograd.Function):
    """Does nothing to a tensor, and calls something in its backward."""

    @staticmethod
    def forward(ctx, tensor, call):
        ctx.call = call
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return gradient, None


class LoopInBackward(Small):
    """A `while` in a backward of its own whose condition never becomes false."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        if step >= FROM_STEP:
            inputs = _Backward.apply(inputs.requires_grad_(), _filter)
        return super().forward(step, inputs, targets)


class DeafLoop(Small):
    """The same where the data is fetched, a filter that lets nothing through, deaf to SIGTERM."""

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        if step >= FROM_STEP:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _filter()
        return super().fetch(step)


class Expression(Small):
    """A regular expression that backtracks 2^40 times: C code that keeps the GIL."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        if step >= FROM_STEP:
            re.match(r"(a?){40}a{40}", "a" * 40)
        return super().forward(step, inputs, targets)


class LockedCall(Small):
    """A C call that waits for a lock, its own, and never lets the GIL go."""

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        if step >= FROM_STEP:
            mutex = ctypes.create_string_buffer(128)  # zeros are a mutex that is free
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        return super().fetch(step)


class LockTwice(Small):
    """A lock that its owner takes once more."""

    lock = threading.Lock()

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.lock:
            if step >= FROM_STEP:
                self.lock.acquire()
            return super().forward(step, inputs, targets)


class SleepingLoader(Small):
    """Data that does not come."""

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        if step >= FROM_STEP:
            time.sleep(LONG_S)
        return super().fetch(step)


class DeadProducer(Small):
    """A queue whose producer has ended after FROM_STEP batches without a word."""

    def __init__(self, settings: dict, progress) -> None:
        super().__init__(settings, progress)
        self.batches: queue.Queue = queue.Queue()
        threading.Thread(target=self._produce, daemon=True).start()

    def _produce(self) -> None:
        for step in range(FROM_STEP):
            self.batches.put(Small.fetch(self, step))

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        return self.batches.get()


class EmptyPipe(Small):
    """A read from a pipe into which nobody writes."""

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        if step >= FROM_STEP:
            os.read(os.pipe()[0], 1)
        return super().fetch(step)


class Stopped(Small):
    """SIGSTOP, as a terminal or a batch system sends it."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        if step >= FROM_STEP:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(step, inputs, targets)


class NativeLoop(Small):
    """C code at work without the GIL that does not end while anybody waits."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        if step >= FROM_STEP:
            hashlib.pbkdf2_hmac("sha256", b"key", b"salt", ROUNDS)
        return super().forward(step, inputs, targets)


def _filter() -> None:
    count = 0
    while count >= 0:  # always
        count += 1
