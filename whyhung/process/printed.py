"""Output of a trial: its last lines, and a bound on its size on disk."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

LINES = 20
MOST = 256 * 2**20  # bytes of one stream on the disk
KEPT = 2**18  # bytes that are kept when it is cut
WIDTH = 400
EVERY_S = 0.25


class Printed:
    """Output below a trial's folder, of one process or of ranks under torchrun."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cut, self._next = folder, 0, 0.0

    def bound(self) -> None:
        """Truncate streams of more than MOST bytes and keep only their end; call this often.

        The end is moved to a file beside the stream; only output printed meanwhile is lost.
        """
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY_S
        for file in self._files():
            with contextlib.suppress(OSError):
                # Blocks, since a stream not opened for appending has a hole where it was cut.
                if (size := file.stat().st_blocks * 512) > MOST:
                    _beside(file).write_bytes(_end_of(file, KEPT))
                    os.truncate(file, 0)
                    self.cut += size

    def last(self, ranks: int = 1, first: int | None = None) -> list[str]:
        """Return the last LINES lines, stdout before stderr; of several ranks, 0 and `first`."""
        if ranks == 1:
            streams = [("", self.folder / f"std{name}.txt") for name in ("out", "err")]
        else:
            shown = sorted({0, first or 0})
            streams = [
                (f"rank {rank}: ", file)
                for rank in shown
                for name in ("out", "err")
                for file in sorted(self.folder.glob(f"logs/*/*/{rank}/std{name}.log"))[-1:]
            ]
        found = [[before + line for line in last_lines(file)] for before, file in streams]
        # A stream may use the share that others leave.
        while sum(map(len, found)) > LINES:
            del max(found, key=len)[0]
        return [line for lines in found for line in lines]

    def note(self) -> str:
        """Return a note on output that was cut, "" if nothing was."""
        gib = self.cut / 2**30
        return f"of its output {gib:.1f} GiB were not kept, only the end" if self.cut else ""

    def _files(self) -> list[Path]:
        own = [self.folder / "stdout.txt", self.folder / "stderr.txt"]
        return [*own, *self.folder.glob("logs/*/*/*/std*.log")]


def _beside(file: Path) -> Path:
    return file.with_name(f"{file.name}.before")


def _end_of(file: Path, size: int) -> bytes:
    with open(file, "rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - size))
        return stream.read(size)


def last_lines(file: Path) -> list[str]:
    """Return the last LINES lines; of a progress bar that overwrites itself, the visible part."""
    content = b""
    for one in (_beside(file), file):
        with contextlib.suppress(OSError):
            content += _end_of(one, KEPT)
    lines = [line.rstrip().rpartition("\r")[2] for line in
             content.decode(errors="replace").replace("\0", "").split("\n")]  # fmt: skip
    return [line[:WIDTH] for line in lines if line.strip()][-LINES:]
