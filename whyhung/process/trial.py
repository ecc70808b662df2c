"""Run one function in a child process and report how it ended, whatever happened in there."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from whyhung.process import child, family
from whyhung.process.procfs import kernel_kills
from whyhung.watch import looks

_POLL_S = 0.02
_TERM_S = 2.0
_TAIL_BYTES = 4000
_KEPT: set[Path] = set()  # folders of the trials that this process currently runs
_KEPT_LOCK = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """Outcome of a trial.

    status: "ok"; "oom", out of device or host memory; "timeout", still running at its deadline
    (for any reason); "crash", ended by a signal; "error", an exception or an early exit.
    A sweep adds "declined" and "not run".
    """

    status: str
    result: dict | None  # the function's return value, for "ok" only
    seconds: float
    message: str  # one line, empty for "ok"
    returncode: int | None
    evidence: str = ""  # the traceback's tail, the stacks at the deadline, or the tail of stderr
    alone: bool = True  # no other trial of its sweep ran beside it
    so_far: dict | None = None  # what `child.so_far` stored last, unless "ok"


class Stopped(Exception):
    """Raised when the trial has ended, with all it started, at the caller's request."""


def run_child(
    entry: str,
    spec: dict,
    *,
    deadline_s: float,
    folder: str | Path | None = None,
    env: dict[str, str] | None = None,
    stop: threading.Event | None = None,
    watch: Callable[[int], str] | None = None,
    python: str | None = None,
) -> Outcome:
    """Call `entry` ("package.module:function") with `spec` in a new Python process.

    The child finds the modules that this process finds, has its own session, and is ended with
    everything it started when it returns, when `deadline_s` (start-up included) has passed, when
    this process dies, or when `stop` is set. `env` is added to this process's environment;
    `folder` keeps spec.json, result.json, stdout.txt and stderr.txt, and so_far.json of a function
    that stored one and did not return (None: nothing is kept).
    `watch` is called with the child's pid while it runs, many times a second; once it returns a
    reason, the child is ended as at a deadline, with that as its message. `python` is another
    interpreter with its own packages: from this one's path it gets only what is not installed.

    Raises ValueError for an entry that does not exist, a spec that is not JSON, a deadline that is
    not positive, or a folder that another call still writes to; Stopped after `stop`. How the
    child ended raises nothing.
    """
    check_entry(entry)
    if not deadline_s > 0:
        raise ValueError(f"deadline_s={deadline_s} must be greater than 0 seconds")
    try:
        text = json.dumps(spec, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the spec of {entry} must fit JSON: {error}") from None
    cookie = family.new_cookie()
    with _files_in(folder) as files, family.guarded(cookie) as guard:
        spec_file, result, stderr = (files / n for n in ("spec.json", "result.json", "stderr.txt"))
        spec_file.write_text(text, encoding="utf-8")
        so_far = files / "so_far.json"
        for old in (result, so_far):
            old.unlink(missing_ok=True)
        kills, started = kernel_kills(), time.monotonic()
        with open(files / "stdout.txt", "wb") as out, open(stderr, "wb") as err:
            process = subprocess.Popen(
                [
                    *(python or sys.executable, "-X", "faulthandler", "-m"),
                    *("whyhung.process.child", entry, str(spec_file), str(result)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env=_environment(env or {}, cookie, python) | guard | {child.SO_FAR: str(so_far)},
            )
        seen = late = None
        roots = {process.pid}
        try:
            while process.poll() is None:
                if stop is not None and stop.is_set():
                    raise Stopped(f"{entry} was stopped")
                late = watch(process.pid) if watch is not None else None
                if time.monotonic() - started > deadline_s:
                    late = late or f"still running after {deadline_s:g} s"
                if late and process.poll() is None:
                    seen = ""
                    if watch is None:  # else the watcher has looked already
                        with contextlib.suppress(OSError):
                            seen = looks.asked(process.pid, stderr)[: 4 * _TAIL_BYTES]
                    roots = family.family(cookie, roots)  # while it still leads to all of them
                    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                        process.terminate()
                        process.wait(_TERM_S)
                    break
                time.sleep(_POLL_S)
        finally:
            seconds = time.monotonic() - started
            if process.returncode is not None:
                roots = roots - {process.pid}  # reaped, so the PID may have been reused
            family.end_family(cookie, roots)
            process.wait()
        stored = child.read(so_far)
        if seen is not None:
            return Outcome("timeout", None, seconds, late, process.returncode, seen, so_far=stored)
        left = child.read(result, {})
        if left.get("refused"):
            module, _, name = entry.partition(":")
            raise ValueError(f"{entry!r} cannot be run: {module} has no {name!r}")
        killed = (kernel_kills() or 0) > (kills or 0)
        ended = _outcome(process.returncode, left, seconds, stderr, killed)
        if ended.status == "ok":
            so_far.unlink(missing_ok=True)
            return ended
        return replace(ended, so_far=stored)


@contextlib.contextmanager
def _files_in(folder: str | Path | None) -> Iterator[Path]:
    """Yield the folder, exclusive to this call; a temporary one for None."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="nsa-trial-") as temporary:
            yield Path(temporary)
        return
    folder = Path(folder).resolve()
    with _KEPT_LOCK:
        if folder in _KEPT:
            raise ValueError(f"folder={str(folder)!r} is another trial's, which still runs")
        _KEPT.add(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    finally:
        with _KEPT_LOCK:
            _KEPT.remove(folder)


def _outcome(returncode: int, left: dict, seconds: float, stderr: Path, killed: bool) -> Outcome:
    """Return the Outcome; killed: the kernel has ended a process for memory meanwhile."""
    if left and returncode >= 0:
        message, evidence = left.get("message", ""), left.get("traceback", "")
        return Outcome(left["status"], left.get("result"), seconds, message, returncode, evidence)
    if returncode == -signal.SIGKILL and killed:
        status = "oom"
        message = "killed by the kernel: the host's memory, or this group's, was used up"
    elif returncode < 0:
        status, message = "crash", f"ended by {family.signal_name(-returncode)}"
    else:
        status, message = "error", f"exited with {returncode} before it had a result"
    with open(stderr, "rb") as stream:
        stream.seek(max(0, stderr.stat().st_size - _TAIL_BYTES))
        evidence = stream.read().decode(errors="replace")
    return Outcome(status, None, seconds, message, returncode, evidence)


def _environment(env: dict[str, str], cookie: str, python: str | None) -> dict[str, str]:
    given = family.environment({**os.environ, **env}, cookie)
    places = [os.path.abspath(place) for place in sys.path]
    if python is not None:
        own = tuple(os.path.abspath(place) for place in sysconfig.get_paths().values())
        places = [place for place in places if not place.startswith(own)]
        # This package may lie among this interpreter's own, which would bring its torch along.
        first = given.get("PYTHONPATH", "").split(os.pathsep)
        kept = [place for place in first if not os.path.abspath(place).startswith(own)]
        given["PYTHONPATH"] = os.pathsep.join(kept)
    return given | {child.PATH: json.dumps(places)}


def check_entry(entry: str) -> None:
    """Raise ValueError unless `entry` is "package.module:function" of a module that exists."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", entry):
        raise ValueError(f"entry={entry!r} is not of the form 'package.module:function'")
    module = entry.partition(":")[0]
    if module == "__main__":
        raise ValueError(
            f"entry={entry!r}: a new process does not have what a notebook or script defines; "
            "put the function into a module and name that"
        )
    try:
        found = module in sys.modules or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ValueError(f"entry={entry!r}: there is no module {module}")
