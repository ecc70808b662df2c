"""Storage of trials on disk: each once, by id, with its evidence and verdict."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from whyhung.process import child, preflight, runner, script, sources
from whyhung.process.runner import Spec
from whyhung.verdict import Verdict, judge
from whyhung.watch.evidence import Evidence
from workbook.lab import attached

FULL = (errno.ENOSPC, errno.EDQUOT)
MATTERS = ("deadline_s", "stall_s", "factor")  # options that are part of a trial's id
WAIT_S = 0.1


class Ledger:
    """Finished trials below `root`, one folder each: a stored trial is not run again.

    Two supervisors may share it: one waits for a trial that the other runs. A folder appears
    atomically: a killed supervisor loses only the trial in flight, and the next one replaces it.

    <id>/ contains evidence.json, verdict.json, and files of the trial's processes. <id>-1, <id>-2,
    ... are earlier runs of repeated trials. Names that begin with a dot are in flight.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def id(self, spec: Spec, **options: Any) -> str:
        """Return the trial's id: a hash of its spec, source, environment, and deadlines if given.

        If a stored trial of that id loaded files by names computed at run time, and these have
        changed, their hashes give another id: both trials are kept.
        """
        environment = preflight.environment(spec.python)
        limits = {name: options[name] for name in MATTERS if options.get(name) is not None}
        if script.is_script(spec.subject):  # which may read and write files there
            limits["folder"] = os.getcwd()
        id = spec.id(preflight.source_hash(spec.subject), {**environment, **limits})
        while (loaded := self._loaded(id)) != (now := sources.hashes(loaded)):
            id = hashlib.sha256(f"{id} {json.dumps(now)}".encode()).hexdigest()[:12]
        return id

    def _loaded(self, id: str) -> dict[str, str]:
        """{file: hash} of files a finished trial imported beyond its import statements, sorted."""
        left = sorted((self.root / id).glob("loaded-*.json"))
        return dict(sorted(pair for file in left for pair in child.read(file, {}).items()))

    def get(self, id: str) -> tuple[Evidence, Verdict] | None:
        """Return (Evidence, Verdict) of a finished trial, else None."""
        place = self.root / id
        try:
            verdict = json.loads((place / "verdict.json").read_bytes())
            if (packed := place / "evidence.json.gz").is_file():  # a kept run
                evidence = json.loads(gzip.decompress(packed.read_bytes()))
            else:
                evidence = json.loads((place / "evidence.json").read_bytes())
        except (OSError, ValueError, EOFError):
            return None
        return Evidence.from_dict(evidence), Verdict.from_dict(verdict)

    def settled(self, id: str) -> tuple[Evidence, Verdict] | None:
        """Like `get`, but None for an INCONCLUSIVE trial, which must run again."""
        found = self.get(id)
        return None if found is None or found[1].kind == "INCONCLUSIVE" else found

    def ids(self) -> list[str]:
        """Ids of all finished trials, oldest first."""
        found = []
        for file in self.root.glob("*/verdict.json"):
            with contextlib.suppress(OSError):  # another supervisor is replacing it
                found.append((file.stat().st_mtime, file.parent.name))
        return [name for _, name in sorted(found) if not name.startswith(".")]

    def put(
        self, id: str, evidence: Evidence, verdict: Verdict, folder: str | Path | None = None
    ) -> Path:
        """Store a finished trial with `folder`, which is moved; return the trial's folder.

        A stored one becomes an earlier run, unless it was inconclusive. Raises OSError with an
        explanation if the disk is full: trials stored before are kept.
        """
        place = Path(folder) if folder is not None else self.root / f".{id}.{os.getpid()}"
        target, old = self.root / id, self.root / f".{id}.old"
        with self._undone(id, place):
            place.mkdir(parents=True, exist_ok=True)
            _write(place / "evidence.json", json.dumps(evidence.to_dict()))
            _write(place / "verdict.json", json.dumps(verdict.to_dict(), indent=1))
            shutil.rmtree(old, ignore_errors=True)
            if self.settled(id):
                numbers = (n for n in count(1) if not (self.root / f"{id}-{n}").exists())
                os.replace(target, self.root / f"{id}-{next(numbers)}")
            with contextlib.suppress(FileNotFoundError):  # else it was inconclusive
                os.replace(target, old)
            os.replace(place, target)
            shutil.rmtree(old, ignore_errors=True)
        return target

    def run(
        self, spec: Spec, *, again: bool = False, **options: Any
    ) -> tuple[str, Evidence, Verdict]:
        """Return (id, Evidence, Verdict) from the ledger, or run the trial and store it.

        `options` are those of runner.run, except `folder`. A stored INCONCLUSIVE is rerun, and with
        `again` any trial, whose stored run is then kept as an earlier run.
        """
        id = self.id(spec, **options)
        if not again and (found := self.settled(id)):
            return (id, *found)
        with self._claimed(id, options.get("stop")):
            if not again and (found := self.settled(id)):  # finished by the previous holder
                return (id, *found)
            place = self.root / f".{id}.flight"
            with self._undone(id, place):
                evidence = runner.run(spec, folder=place, attached=attached.PATH, **options)
                verdict = judge(evidence)
            self.put(id, evidence, verdict, place)
            return id, evidence, verdict

    @contextlib.contextmanager
    def _undone(self, id: str, place: Path | None = None) -> Iterator[None]:
        """Remove `place` on any exception; explain a full disk in the error."""
        try:
            yield
        except BaseException as error:
            if place is not None:
                shutil.rmtree(place, ignore_errors=True)
            if not isinstance(error, OSError) or error.errno not in FULL:
                raise
            raise OSError(
                error.errno,
                f"the disk of {self.root} is full: trial {id} is lost, the {len(self.ids())} "
                "before it are kept; free some space and run again",
            ) from error

    @contextlib.contextmanager
    def _claimed(self, id: str, stop: threading.Event | None) -> Iterator[None]:
        """Hold an exclusive lock on this trial, released when its holder ends in any way.

        The file is never removed: a new one would be another lock.
        """
        locks = self.root / ".locks"
        with self._undone(id):
            locks.mkdir(parents=True, exist_ok=True)
            opened = open(locks / id, "a+")  # noqa: SIM115
        with opened:
            while True:
                try:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if stop is not None and stop.is_set():
                        raise InterruptedError(f"stopped while another ran trial {id}") from None
                    time.sleep(WAIT_S)
            yield


def _write(path: Path, text: str) -> None:
    """Write and fsync: otherwise a later rename could reach the disk before the content."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
