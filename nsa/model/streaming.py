"""Real text streamed from Hugging Face: FineWeb-Edu by default (pip install datasets).

Each byte received is appended to a file, and a batch is a function of the bytes up to it. So
batches are random access like any other data's, a run can be resumed without the network up to the
bytes already received, and two runs on one file see the same text.
"""

import fcntl
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch

from nsa.model.data import Batch, Device, check_sizes, spread_ms, with_successors

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
END = b"\0"  # between documents; UTF-8 text has no other use for it
FIRST_WAIT_S = 1.0  # before the second attempt; doubled for each further one
LONGEST_WAIT_S = 60.0
FETCHES = 100_000  # documents whose times are kept


class NoText(RuntimeError):
    """The stream cannot be read; the message has the package to install or variable to set."""


@dataclass
class Stream:
    """Documents of a Hugging Face data set, concatenated to one sequence of bytes (vocabulary 256).

    Batch `step` starts at byte step * batch * (tokens + 1): row by row, without overlap, no byte
    twice. It is the same for equal (data set, subset, split, seed, shuffle_buffer), sizes and
    release of the data set, whichever step is requested first: a step far ahead waits for all the
    text before it. Fetched text is kept in `cache` and never fetched again.

    Documents are UTF-8 with a zero byte after each, in the order of the stream shuffled in a buffer
    of `shuffle_buffer` documents by `seed` (0: unshuffled). After `retries` failed attempts in a
    row, with doubling waits, NoText is raised with the last error. With HF_HUB_OFFLINE set nothing
    is tried beyond the cache. Processes may share a cache, as ranks do.
    """

    dataset: str = FINEWEB_EDU
    subset: str | None = "sample-10BT"
    split: str = "train"
    seed: int = 1337
    shuffle_buffer: int = 1000
    column: str = "text"
    cache: Path | None = None  # None: below ~/.cache/nsa
    retries: int = 5
    waited_s: float = field(default=0.0, init=False)  # between attempts
    fetches_s: deque[float] = field(  # of the newest documents, attempts and waits included
        default_factory=lambda: deque(maxlen=FETCHES), init=False, repr=False
    )
    fetched_s: float = field(default=0.0, init=False)  # of all documents together
    fetched_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name, least in (("shuffle_buffer", 0), ("retries", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.cache = Path(self.cache or Path(home) / "nsa").expanduser()
        self._documents, self._next_document = None, 0  # the rest of the stream, and its number

    @property
    def name(self) -> str:
        return "/".join(filter(None, (self.dataset, self.subset, self.split)))

    def batch(self, step: int, batch: int, tokens: int, device: Device = "cpu") -> Batch:
        """`batch` passages of `tokens` bytes, and each byte's successor as its target. NoText if
        text is missing and cannot be fetched, ValueError if the data set ends before."""
        check_sizes(step, batch, tokens)
        size = batch * (tokens + 1)
        drawn = torch.frombuffer(bytearray(self._read(step * size, size)), dtype=torch.uint8)
        return with_successors(drawn.view(batch, tokens + 1).long(), device)

    def record(self) -> dict[str, Any]:
        """Record of the text for a run: options, sizes stored, and speed; "fetch" covers text from
        the network in this process, not from the cache."""
        fetch: dict[str, Any] = {"bytes": self.fetched_bytes, "s": self.fetched_s}
        if self.fetched_s > 0:
            fetch["mib_per_s"] = self.fetched_bytes / 2**20 / self.fetched_s
        fetch |= {f"{name}_document_ms": ms for name, ms in spread_ms(list(self.fetches_s)).items()}
        asked = {name: getattr(self, name) for name in ("name", "seed", "shuffle_buffer")}
        stored = {name: getattr(self._stored, name) for name in ("bytes", "documents")}
        return asked | stored | {"waited_s": self.waited_s, "fetch": fetch}

    def _read(self, first: int, count: int) -> bytes:
        stored = self._stored
        while stored.bytes < first + count and stored.refresh() < first + count:
            began = time.perf_counter()
            document = self._next()
            self.fetches_s.append(time.perf_counter() - began)
            self.fetched_s += self.fetches_s[-1]
            if document is None:
                raise ValueError(
                    f"{self.name} has {stored.bytes} bytes, and this batch would end at byte "
                    f"{first + count}; take fewer steps, or smaller batches"
                )
            content = document.encode(errors="replace")
            self.fetched_bytes += len(content)
            stored.add(self._next_document, content)
            self._next_document += 1
        return stored.read(first, count)

    def _next(self) -> str | None:
        """Fetch the next document, with retries; None at the end of the data set."""
        wait = FIRST_WAIT_S
        for attempt in range(1, self.retries + 1):
            try:
                if self._documents is None:
                    self._next_document = max(self._next_document, self._stored.documents)
                    self._documents = self._open(skip=self._next_document)
                return next(self._documents, None)
            except NoText:
                raise
            except Exception as error:  # any error of the network, the hub or a decoder
                self._documents = None  # an iterator that raised is over
                if attempt == self.retries:
                    raise NoText(
                        f"{self.name}: {attempt} attempts failed, the last with "
                        f"{type(error).__name__}: {error}; {self._remedy()}"
                    ) from error
                time.sleep(wait)
                self.waited_s += wait
                wait = min(2 * wait, LONGEST_WAIT_S)
        raise AssertionError("unreachable")

    def _open(self, skip: int) -> Iterator[str]:
        if _offline():
            raise NoText(f"{self.name}: HF_HUB_OFFLINE is set; {self._remedy()}")
        try:
            from datasets import load_dataset
        except ModuleNotFoundError as error:
            raise NoText(
                f"{self.name} streams through Hugging Face's datasets, which is not installed; "
                "pip install datasets, or read a local file: data.text(path=...)"
            ) from error
        rows = load_dataset(self.dataset, self.subset, split=self.split, streaming=True)
        if self.shuffle_buffer:
            rows = rows.shuffle(seed=self.seed, buffer_size=self.shuffle_buffer)
        if skip:
            rows = rows.skip(skip)  # after the shuffle, so that the order stays what it was
        return (row[self.column] for row in rows)

    def _remedy(self) -> str:
        have = f"{self._stored.bytes} bytes of it are in {self._stored.file}"
        mend = "unset HF_HUB_OFFLINE" if _offline() else "mind the network and HF_TOKEN"
        return f"{have}; {mend}, copy a filled cache there, or read a file: data.text(path=...)"

    @cached_property
    def _stored(self) -> "_Stored":
        names = ("dataset", "subset", "split", "column", "seed", "shuffle_buffer")
        asked = [getattr(self, name) for name in names]
        digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
        return _Stored(self.cache / f"stream-{digest}.bytes")


def stream(dataset: str = FINEWEB_EDU, seed: int = 1337, **options: Any) -> Stream:
    """Text from Hugging Face, not read before the first batch; options as in Stream. FineWeb-Edu:
    the sample of 10 billion tokens; other data sets: the default subset."""
    subset = options.pop("subset", "sample-10BT" if dataset == FINEWEB_EDU else None)
    return Stream(dataset, subset, seed=seed, **options)


class _Stored:
    """Complete documents in a file, END after each; a killed process's partial one is cut off."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        self.file = file
        self.documents = self.bytes = 0
        with self._locked() as stream:
            self.refresh()
            stream.truncate(self.bytes)

    def refresh(self) -> int:
        """Bytes up to the end of the last complete document, including those of other processes."""
        place = self.bytes
        with self.file.open("rb") as stream:
            stream.seek(place)
            while chunk := stream.read(1 << 20):
                self.documents += chunk.count(END)
                if END in chunk:
                    self.bytes = place + chunk.rindex(END) + 1
                place += len(chunk)
        return self.bytes

    def add(self, number: int, document: bytes) -> None:
        """Append document `number`, unless another process has."""
        with self._locked() as stream:
            self.refresh()
            if self.documents != number:
                return
            stream.seek(self.bytes)
            stream.write(document.replace(END, b" ") + END)
            stream.flush()
            self.refresh()

    def read(self, first: int, count: int) -> bytes:
        with self.file.open("rb") as stream:
            stream.seek(first)
            return stream.read(count)

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """Open the file with an exclusive write lock, which ends with the process in any case."""
        with self.file.open("r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield stream


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
