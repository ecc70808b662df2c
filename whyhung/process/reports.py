"""Evidence files and pages of a watched command, and messages to its user."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

from whyhung.verdict import Verdict
from whyhung.verdict.explain import page
from whyhung.verdict.headline import headline
from whyhung.watch.evidence import Evidence

WIDE = 100  # columns of a terminal
_CLEAR = "\r\x1b[K"


class Reports:
    """Writer of evidence.json, verdict.json, report.txt and report.md to `folder`, atomically.

    If that cannot be written, the user is notified once, and pages go to stderr.
    """

    def __init__(self, folder: Path, name: str = "whyhung watch") -> None:
        self.folder, self.name = folder, name
        self._refused, self._line = "", ""
        # If the command prints to the same terminal, a line would mix with its own.
        self.draws = sys.stderr.isatty() and not sys.stdout.isatty()

    def say(self, text: str) -> None:
        """Print a line for the user."""
        before = _CLEAR if self._line else "\n" * _half_a_line()
        self._raw(f"{before}{self.name}: {text}\n")
        self._line = ""

    def status(self, text: str) -> None:
        """Redraw the status line ("" removes it), on a terminal not used by the command only."""
        if self.draws and text != self._line:
            self._line = text
            self._raw(_CLEAR + f"{self.name} {text}"[:WIDE] if text else _CLEAR)

    def tell(self, evidence: Evidence, verdict: Verdict) -> None:
        """Write all files, and print what stands still and where the page is."""
        said = headline(evidence, verdict)
        if not self.write(evidence, verdict):
            self._raw(page(evidence, verdict) + "\n")
            self.say(said)
        elif verdict.kind == "SLOW" and evidence.end is None:
            self.say(f"{said}; what would settle it: {self.name.split()[0]} explain {self.folder}")
        else:
            lines = [said, f"the page: {self.folder / 'report.txt'}"]
            for line in lines if evidence.end is None else lines[::-1]:
                self.say(line)

    def write(self, evidence: Evidence, verdict: Verdict) -> bool:
        """Write all files; return False if they cannot be written."""
        return all(
            [
                self.put("evidence.json", json.dumps(evidence.to_dict())),
                self.put("report.txt", page(evidence, verdict)),
                self.put("report.md", page(evidence, verdict, markdown=True)),
                self.put("verdict.json", json.dumps(verdict.to_dict(), indent=1)),
            ]
        )

    def put(self, name: str, text: str) -> bool:
        """Write one file atomically; concurrent readers see the previous content."""
        if not self._refused:
            unfinished = self.folder / f".{name}.{os.getpid()}"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                unfinished.write_text(text, encoding="utf-8")
                unfinished.replace(self.folder / name)
            except OSError as error:
                self._refused = error.strerror or str(error)
                self.say(f"{self.folder} cannot be written ({self._refused}); pages come here")
        return not self._refused

    def _raw(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):  # the terminal is gone: nobody is there to be told
            return


def _half_a_line() -> bool:
    """Return True if the command may have left half a line on stderr, as a progress bar does."""
    try:
        number = sys.stderr.fileno()
        if not stat.S_ISREG(os.fstat(number).st_mode):
            return os.isatty(number)
        with open(f"/proc/self/fd/{number}", "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"
    except (OSError, ValueError):
        return False
