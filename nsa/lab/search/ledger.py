"""Trials on disk: each once, by its id, with its evidence and verdict."""

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

from nsa.lab import attached
from whyhung.process import child, preflight, runner, script, sources
from whyhung.process.runner import Spec
from whyhung.verdict import Verdict, judge
from whyhung.watch.evidence import Evidence

FULL = (errno.ENOSPC, errno.EDQUOT)
MATTERS = ("deadline_s", "stall_s", "factor")  # of how a trial is run, beside what is run
WAIT_S = 0.1


class Ledger:
    """Finished trials below `root`, one folder each: a trial that is there is not run again.

    Two supervisors may share it: one waits for a trial that the other runs. A folder appears whole
    or not at all: a supervisor that is killed loses the trial in flight and nothing else, and the
    next one takes its place.

    <id>/evidence.json and verdict.json, and what the trial's processes wrote. <id>-1, <id>-2, ...
    are earlier runs of trials that were run anew. Names that begin with a dot are in flight.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def id(self, spec: Spec, **options: Any) -> str:
        """The trial's id: of its spec, the source, the environment, and its deadlines if given.

        Where one of that id is there, and files that it loaded by names made up while it ran are no
        longer the same, theirs make another id: both trials are kept.
        """
        environment = preflight.environment(spec.python)
        limits = {name: options[name] for name in MATTERS if options.get(name) is not None}
        if script.is_script(spec.subject):  # which may read and write what lies there
            limits["folder"] = os.getcwd()
        id = spec.id(preflight.source_hash(spec.subject), {**environment, **limits})
        while (loaded := self._loaded(id)) != (now := sources.hashes(loaded)):
            id = hashlib.sha256(f"{id} {json.dumps(now)}".encode()).hexdigest()[:12]
        return id

    def _loaded(self, id: str) -> dict[str, str]:
        """{file: hash} of what a finished trial imported beyond its import statements, sorted."""
        left = sorted((self.root / id).glob("loaded-*.json"))
        return dict(sorted(pair for file in left for pair in child.read(file, {}).items()))

    def get(self, id: str) -> tuple[Evidence, Verdict] | None:
        """(Evidence, Verdict) of a finished trial, else None."""
        place = self.root / id
        try:
            verdict = json.loads((place / "verdict.json").read_bytes())
            if (packed := place / "evidence.json.gz").is_file():  # of a kept run
                evidence = json.loads(gzip.decompress(packed.read_bytes()))
            else:
                evidence = json.loads((place / "evidence.json").read_bytes())
        except (OSError, ValueError, EOFError):
            return None
        return Evidence.from_dict(evidence), Verdict.from_dict(verdict)

    def settled(self, id: str) -> tuple[Evidence, Verdict] | None:
        """`get` of a trial that need not run again: it was not INCONCLUSIVE."""
        found = self.get(id)
        return None if found is None or found[1].kind == "INCONCLUSIVE" else found

    def ids(self) -> list[str]:
        """Of all finished trials, oldest first."""
        found = []
        for file in self.root.glob("*/verdict.json"):
            with contextlib.suppress(OSError):  # another supervisor replaces it just now
                found.append((file.stat().st_mtime, file.parent.name))
        return [name for _, name in sorted(found) if not name.startswith(".")]

    def put(
        self, id: str, evidence: Evidence, verdict: Verdict, folder: str | Path | None = None
    ) -> Path:
        """Stores a finished trial, and `folder` with it, which is moved; returns its folder.

        One that is there becomes an earlier run, unless it was inconclusive. Raises OSError that
        says so when the disk is full: what was stored before stays.
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
        """(id, Evidence, Verdict), out of the store or of a trial run now and stored.

        `options` are those of runner.run, but `folder`. A stored INCONCLUSIVE is run again, and
        with `again` any; the one before is kept then, as an earlier run.
        """
        id = self.id(spec, **options)
        if not again and (found := self.settled(id)):
            return (id, *found)
        with self._claimed(id, options.get("stop")):
            if not again and (found := self.settled(id)):  # whoever held it has finished it
                return (id, *found)
            place = self.root / f".{id}.flight"
            with self._undone(id, place):
                evidence = runner.run(spec, folder=place, attached=attached.PATH, **options)
                verdict = judge(evidence)
            self.put(id, evidence, verdict, place)
            return id, evidence, verdict

    @contextlib.contextmanager
    def _undone(self, id: str, place: Path | None = None) -> Iterator[None]:
        """Whatever is raised leaves nothing in `place`; of a full disk the error tells more."""
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
        """Alone with this trial: a lock that ends with its holder, however that ends.

        The file says who holds it, and is never removed: another one could hold what replaced it.
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
            with contextlib.suppress(OSError):
                opened.truncate(0)
                opened.write(str(os.getpid()))
                opened.flush()
            yield


def _write(path: Path, text: str) -> None:
    """On the disk when it returns: a rename may come before what it renames otherwise."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
