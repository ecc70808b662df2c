"""Training data and its division into batches.

A batch is a function of (seed, step) alone, so a trial that starts at step 5 gets the same batches
as one that started at 0. Tokens are drawn on the CPU, so they are the same for every device.
"""

import hashlib
import os
import platform
import queue
import sys
import sysconfig
import tempfile
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from nsa.model.parallel import Parallel
from nsa.parallel.layout import IGNORED

EVALUATION = 2**40  # first evaluation batch, beyond any training
_NOT_TEXT = {"__pycache__", "site-packages", "dist-packages"}
_CHUNK = 1 << 20  # bytes

Device = str | torch.device
Batch = tuple[Int64[Tensor, "B T"], Int64[Tensor, "B T"]]


@runtime_checkable
class Data(Protocol):
    """Seeded data, stateless in `step`, so that a run can be repeated from any step."""

    def batch(self, step: int, batch: int, tokens: int, device: Device = "cpu") -> Batch:
        """(tokens, targets), both int64 [B, T]; targets of -100 are not scored."""


@dataclass(frozen=True)
class Synthetic:
    """Independent uniform tokens: the loss cannot fall below log(vocab)."""

    seed: int
    vocab: int

    @property
    def name(self) -> str:
        return f"uniform random tokens, vocabulary {self.vocab}"

    def batch(self, step: int, batch: int, tokens: int, device: Device = "cpu") -> Batch:
        """`batch` rows of `tokens` tokens, and each token's successor as its target."""
        check_sizes(step, batch, tokens)
        drawn = torch.randint(self.vocab, (batch, tokens + 1), generator=generator(self.seed, step))
        return with_successors(drawn, device)

    def record(self) -> dict:
        return {"name": self.name, "seed": self.seed}


@dataclass(frozen=True)
class Text:
    """Files as one sequence of bytes (vocabulary 256), read lazily and mapped into memory: text
    of any size takes the memory of the pages that batches touch."""

    name: str
    files: tuple[Path, ...]
    seed: int
    max_bytes: int | None = None  # None: all

    @cached_property
    def data(self) -> UInt8[Tensor, " N"]:
        """The first `max_bytes` bytes of the files in order, without unreadable files.
        ValueError if there are none."""
        count, refused, most = 0, [], self.max_bytes or sys.maxsize
        # One file is mapped where it lies; several are joined in a nameless one.
        with tempfile.TemporaryFile() as joined:
            for file in self.files:
                try:
                    with file.open("rb") as stream:
                        if len(self.files) == 1 and stream.read(1):
                            return _mapped(stream, min(os.fstat(stream.fileno()).st_size, most))
                        while chunk := stream.read(min(_CHUNK, most - count)):
                            count += joined.write(chunk)
                except OSError as error:
                    refused.append(f"{file.name}: {error.strerror or error}")
            if count:
                joined.flush()
                return _mapped(joined, count)
        why = f" ({'; '.join(refused[:3])})" if refused else ""
        raise ValueError(
            f"{self.name}: got 0 bytes from {len(self.files)} file(s){why}; "
            "name a readable file, or a folder with one, that is not empty"
        )

    def batch(self, step: int, batch: int, tokens: int, device: Device = "cpu") -> Batch:
        """`batch` passages of `tokens` bytes, and each byte's successor as its target. ValueError
        if the text has fewer than tokens + 1 bytes."""
        check_sizes(step, batch, tokens)
        if len(self.data) <= tokens:
            raise ValueError(
                f"{self.name}: got {len(self.data)} bytes, but {tokens} tokens and the last one's "
                f"target need {tokens + 1}; name a larger file or folder, or take at most "
                f"{len(self.data) - 1} tokens"
            )
        return with_successors(passages(self.data, self.seed, step, batch, tokens).long(), device)

    def record(self) -> dict:
        """Record of the text for a run, to check that another machine read the same bytes."""
        digest = hashlib.sha256(self.data.numpy()).hexdigest()
        return {"name": self.name, "seed": self.seed, "bytes": len(self.data), "sha256": digest}


def synthetic(seed: int = 1337, vocab: int = 256) -> Synthetic:
    """Seeded uniform tokens in [0, vocab)."""
    if vocab < 2:
        raise ValueError(f"vocab={vocab}: a token needs at least 2 values to choose from")
    return Synthetic(seed, vocab)


def text(
    path: str | os.PathLike | None = None, seed: int = 1337, max_bytes: int | None = None
) -> Text:
    """Real text as bytes: the file `path`, or every file below the folder `path`.

    Without a path, the sources of the Python standard library, which every machine has; their
    bytes differ between Python versions. A folder's files are sorted by name, then its folders;
    nothing is read before the first batch. ValueError if there is no such file.
    """
    if max_bytes is not None and max_bytes < 2:
        raise ValueError(f"max_bytes={max_bytes}: a token and its target need at least 2")
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        files = tuple(file for file in _files_below(folder) if file.suffix == ".py")
        name = f"the standard library of Python {platform.python_version()}"
        remedy = "this Python has no sources; name a file or folder of your own: text(path=...)"
    else:
        named, name = Path(path).expanduser(), str(path)
        if not named.exists():
            raise ValueError(f"{named}: got 0 bytes, there is no such file or folder; name one")
        files = (named,) if named.is_file() else tuple(_files_below(named))
        remedy = "name a regular file, or a folder with at least one"
    if not files:
        raise ValueError(f"{name}: got 0 bytes, no file was found there; {remedy}")
    return Text(name, files, seed, max_bytes)


def _files_below(folder: Path) -> Iterator[Path]:
    """Regular files, in the same order on every machine. Reading a pipe could block forever."""
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _NOT_TEXT)
        yield from (file for name in sorted(names) if (file := Path(where, name)).is_file())


def _mapped(stream: Any, count: int) -> UInt8[Tensor, " N"]:
    """Map the first `count` bytes of a file. Copy on write: torch wants memory that it may write
    to, and the file stays as it is."""
    return torch.from_numpy(np.memmap(stream, np.uint8, "c", shape=(count,)))


def check_sizes(step: int, batch: int, tokens: int) -> None:
    """Raise ValueError for a negative step or an empty batch."""
    if step < 0 or batch < 1 or tokens < 1:
        raise ValueError(
            f"step={step}, batch={batch}, tokens={tokens}: "
            "a batch needs step >= 0, batch >= 1 and tokens >= 1"
        )


def generator(seed: int, step: int) -> torch.Generator:
    """Generator on the CPU, a function of (seed, step); different pairs give unrelated ones."""
    # A hash, because seed + step would give seed 1 at step 1 the tokens of seed 2 at step 0.
    mixed = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed, "little"))


def passages(data: Tensor, seed: int, step: int, batch: int, tokens: int) -> Tensor:
    """`batch` passages of tokens + 1 entries of data [N], drawn by (seed, step)."""
    random = generator(seed, step)
    starts = torch.randint(len(data) - tokens, (batch, 1), generator=random)
    return data[starts + torch.arange(tokens + 1)]


def with_successors(drawn: Tensor, device: Device) -> Batch:
    """Split drawn [B, T + 1] into T tokens per row and each token's successor as its target."""
    drawn = drawn.to(device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


@dataclass(frozen=True)
class Share:
    """A rank's rows, [b, T] each, split by `micro()`; weights [accumulate], or None for 1."""

    tokens: Tensor
    targets: Tensor
    weights: Tensor | None = None
    accumulate: int = 1

    def micro(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """(tokens, targets, weight) of each micro-batch."""
        each = [None] * self.accumulate if self.weights is None else self.weights.unbind()
        halves = self.tokens.chunk(self.accumulate), self.targets.chunk(self.accumulate)
        return list(zip(*halves, each, strict=True))

    def tensors(self) -> list[Tensor]:
        """Tensors that are not None."""
        return [x for x in (self.tokens, self.targets, self.weights) if x is not None]

    def to(self, device: torch.device) -> "Share":
        """Copy to the device without waiting for it."""

        def moved(x: Tensor) -> Tensor:
            if device.type == "cuda" and x.device.type == "cpu":
                # Without pinned memory, the copy would wait for the previous step to end.
                return x.pin_memory().to(device, non_blocking=True)
            return x.to(device)

        return Share(*map(moved, self.tensors()), accumulate=self.accumulate)


def share_of(
    tokens: Tensor,
    targets: Tensor,
    parallel: Parallel,
    accumulate: int,
    rows: slice,
    multiple: int = 1,
) -> Share:
    """One rank's share of the global batch, which every rank has drawn; `multiple` is of the
    chunks of a sequence on several ranks.

    A micro-batch's weight is its fraction of the batch's scored targets, times the ranks over which
    gradients are averaged: all micro-batches together give the mean over scored targets.
    """
    weights, scored = None, (targets != IGNORED).sum()
    tokens, targets = parallel.shard(tokens[rows], targets[rows], multiple)
    if parallel.ranks * accumulate > 1:
        mine = (targets != IGNORED).reshape(accumulate, -1).sum(-1)
        weights = (mine.double() * parallel.ranks / scored).float()
    return Share(tokens, targets, weights, accumulate)


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """{"p50", "p95", "max"} of the seconds, in ms; {} if there are none."""
    if not len(seconds):
        return {}
    p50, p95 = np.quantile(seconds, (0.5, 0.95))
    return {"p50": 1e3 * float(p50), "p95": 1e3 * float(p95), "max": 1e3 * max(seconds)}


class Prefetch:
    """`data` with its next `depth` batches drawn and pinned by a thread while the step computes.

    Batches are those of `data`, in any order of steps: a step that does not follow the last one
    (a resumed run, an evaluation in between) restarts the thread there. Sizes may change too.

    `waits_s` has the wait for each batch, `wait_s` is the newest of them, `waited_s` their sum and
    `batches` their number. An error of the thread is raised by `batch`, with the thread's
    traceback. `close`, leaving a `with`, or dropping the object stops the thread.

    Raises ValueError for a depth below 1.
    """

    def __init__(self, data: Data, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth} must be at least 1: the next batch")
        self.data, self.depth = data, depth
        self.pin = torch.cuda.is_available()  # only a GPU copies from pinned memory
        self.wait_s = self.waited_s = 0.0
        self.waits_s = array("d")
        self._thread, self._closed = None, False
        self._ahead: deque[tuple[tuple[int, int, int], Future]] = deque()

    def batch(self, step: int, batch: int, tokens: int, device: Device = "cpu") -> Batch:
        """`data.batch(...)`, in pinned memory where useful. ValueError once closed."""
        if self._closed:
            raise ValueError(f"step {step}: this Prefetch was closed; make another")
        started = time.perf_counter()
        if not self._ahead or self._ahead[0][0] != (step, batch, tokens):
            self._stop()
            self._start()
        for later in range(step + len(self._ahead), step + self.depth + 2):
            self._ahead.append(((later, batch, tokens), Future()))
            self._asked.put(self._ahead[-1])
        try:
            _, drawn = self._ahead.popleft()
            if error := drawn.exception():  # waits for it
                error.add_note(f"while the batch of step {step} was drawn ahead")
                raise error
        except BaseException:
            self._stop()  # so that the step can be tried again
            raise
        self.wait_s = time.perf_counter() - started
        self.waited_s += self.wait_s
        self.waits_s.append(self.wait_s)
        if torch.device(device).type == "cpu":
            return drawn.result()
        ids, targets = (x.to(device, non_blocking=self.pin) for x in drawn.result())
        return ids, targets

    def record(self) -> dict[str, Any]:
        """The record of `data`, and the waits for its batches."""
        inner = self.data.record() if hasattr(self.data, "record") else {}
        waits = {"mean_wait_ms": 1e3 * self.waited_s / max(1, self.batches)}
        waits |= {f"{name}_wait_ms": ms for name, ms in spread_ms(self.waits_s).items()}
        return {**inner, "prefetch": {"depth": self.depth, **waits}}

    @property
    def batches(self) -> int:
        return len(self.waits_s)

    def close(self) -> None:
        """Stop the thread after its current batch. May be called twice."""
        self._closed = True
        self._stop()

    def _start(self) -> None:
        self._asked = queue.SimpleQueue()
        given = self.data, self.pin, self._asked
        self._thread = threading.Thread(target=_draw, args=given, name="nsa-prefetch", daemon=True)
        self._thread.start()

    def _stop(self, wait: bool = True) -> None:
        if self._thread is not None:
            for _, drawn in self._ahead:
                drawn.cancel()
            self._ahead.clear()
            self._asked.put(None)
            if wait:
                self._thread.join()
            self._thread = None

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_ahead"):
            self._stop(wait=False)


def _draw(data: Data, pin: bool, asked: queue.SimpleQueue) -> None:
    """Draw the batches that are asked for, in order, up to None or an error."""
    while (one := asked.get()) is not None:
        sizes, drawn = one
        if drawn.set_running_or_notify_cancel():
            try:
                found = data.batch(*sizes)
                drawn.set_result(tuple(x.pin_memory() if pin else x for x in found))
            except BaseException as error:
                drawn.set_exception(error)
                return
