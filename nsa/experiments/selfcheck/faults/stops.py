"""Steps that end the process, and steps that stop moving, each in another way from FROM_STEP on."""

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
from pathlib import Path

import torch
from torch import Tensor

from nsa.experiments.selfcheck.faults.small import FROM_STEP, MIB, Small

LONG_S = 3600.0  # longer than any trial: ended by its supervisor, or with it
ROUNDS = 2**31 - 1  # of a hash: about an hour in C without the GIL


class AtForward(Small):
    """`happen` comes before the forward, from FROM_STEP on."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        if step >= FROM_STEP:
            self.happen()
        return super().forward(step, inputs, targets)

    def happen(self) -> None:
        raise NotImplementedError


class AtFetch(Small):
    """`happen` comes before the data, from FROM_STEP on."""

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        if step >= FROM_STEP:
            self.happen()
        return super().fetch(step)

    def happen(self) -> None:
        raise NotImplementedError


class Raises(AtForward):
    """An exception of a library, with a message of two lines."""

    def happen(self) -> None:
        raise KeyError("the shard 'part-00003' is not in the index\nof 3 shards")


class Overwritten(Small):
    """A tensor that the backward needs is changed in place: autograd counts its versions."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model[0](inputs).exp()
        loss = (self.model[2:](hidden) - targets).square().mean()
        if step == FROM_STEP:
            hidden.add_(1)
        return loss


class Killed(AtForward):
    """SIGKILL, as the kernel or a batch system sends it: no word, no traceback."""

    def happen(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class BadPointer(AtForward):
    """A read at an address that is nobody's: SIGSEGV."""

    def happen(self) -> None:
        ctypes.string_at(1)


class Aborts(AtForward):
    """abort(), as C++ does when an exception meets nobody: SIGABRT."""

    def happen(self) -> None:
        ctypes.CDLL(None).abort()


class Leaves(AtForward):
    """sys.exit in the middle, with a code of its own."""

    def happen(self) -> None:
        sys.exit(3)


class LeavesSilently(AtForward):
    """Ends at once and says that all is well, with steps left to do."""

    def happen(self) -> None:
        os._exit(0)


class OutOfAddresses(AtForward):
    """Tensors until the process may have no more; the limit is its own, the host is not used up."""

    def happen(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 256 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
        held = []
        while True:
            held.append(torch.empty(32 * MIB, dtype=torch.uint8))


class TooLarge(AtForward):
    """One tensor larger than any machine."""

    def happen(self) -> None:
        torch.empty(2**55, dtype=torch.uint8)


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


class DeafLoop(AtFetch):
    """The same where the data is fetched, a filter that lets nothing through, deaf to SIGTERM."""

    def happen(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _filter()


class Expression(AtForward):
    """A regular expression that backtracks 2^40 times: C code that keeps the GIL."""

    def happen(self) -> None:
        re.match(r"(a?){40}a{40}", "a" * 40)


class LockedCall(AtFetch):
    """A C call that waits for a lock, its own, and never lets the GIL go."""

    def happen(self) -> None:
        mutex = ctypes.create_string_buffer(128)  # zeros are a mutex that is free
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)


class LockTwice(AtForward):
    """A lock that its owner takes once more."""

    def happen(self) -> None:
        lock = threading.Lock()
        with lock:
            lock.acquire()


class SleepingLoader(AtFetch):
    """Data that does not come."""

    def happen(self) -> None:
        time.sleep(LONG_S)


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


class EmptyPipe(AtFetch):
    """A read from a pipe into which nobody writes."""

    def happen(self) -> None:
        os.read(os.pipe()[0], 1)


class Stopped(AtForward):
    """SIGSTOP, as a terminal or a batch system sends it."""

    def happen(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class NativeLoop(AtForward):
    """C code at work without the GIL that does not end while anybody waits."""

    def happen(self) -> None:
        hashlib.pbkdf2_hmac("sha256", b"key", b"salt", ROUNDS)


def _filter() -> None:
    count = 0
    while count >= 0:  # always
        count += 1
