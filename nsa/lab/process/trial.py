"""Runs one function in a child process and tells how that ended, whatever happened in there."""

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
from dataclasses import dataclass
from pathlib import Path

from nsa.lab.process import child, family
from nsa.lab.process.out_of_memory import kernel_kills
from nsa.lab.watch import looks

STATUSES = ("ok", "oom", "timeout", "crash", "error")
_POLL_S = 0.02
_TERM_S = 2.0
_TAIL_BYTES = 4000
_KEPT: set[Path] = set()  # the folders of the trials that this process runs just now
_KEPT_LOCK = threading.Lock()


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    status: "ok"; "oom", out of device or host memory; "timeout", still running at its deadline
    (which does not say why); "crash", ended by a signal; "error", an exception or an early exit.
    A sweep adds "declined" and "not run". result: what the function returned, for "ok" only.
    message: one line, empty for "ok". evidence: the traceback's tail, the stacks at the deadline,
    or the tail of stderr. alone: no other trial of its sweep ran beside it.
    """

    status: str
    result: dict | None
    seconds: float
    message: str
    returncode: int | None
    evidence: str = ""
    alone: bool = True


class Stopped(Exception):
    """The caller asked for the trial to end; it has, with all it started."""


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
    """Calls `entry` ("package.module:function") with `spec` in a new Python process.

    The child finds the modules that this process finds, lives in a session of its own, and is ended
    with everything it started when it returns, when `deadline_s` (start-up included) has passed,
    when this process dies, or when `stop` is set. `env` is added to this process's environment;
    `folder` keeps spec.json, result.json, stdout.txt and stderr.txt (None: nothing is kept).
    `watch` is called with the child's pid while it runs, many times a second; once it returns a
    reason, the child is ended as at a deadline, with that as its message. `python` is another
    interpreter, with packages of its own: of this one's path it gets what is no package.

    Raises ValueError for an entry that does not exist, a spec that is no JSON, a deadline that is
    not positive, or a folder that another call still writes to; Stopped after `stop`; nothing for
    how the child ended.
    """
    check_entry(entry)
    if not deadline_s > 0:
        raise ValueError(f"deadline_s={deadline_s} must be greater than 0 seconds")
    try:
        text = json.dumps(spec, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the spec of {entry} must fit JSON: {error}") from None
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="nsa-trial-") as temporary:
            return _run(entry, text, deadline_s, Path(temporary), env or {}, stop, watch, python)
    with _alone_in(Path(folder).resolve()) as kept:
        return _run(entry, text, deadline_s, kept, env or {}, stop, watch, python)


def place_of(folder: str | Path | None, number: int, what: object) -> Path | None:
    """Where one of several trials keeps its files: `folder`/007-what-it-is; None without a folder.

    The number tells those apart that say the same of themselves.
    """
    if folder is None:
        return None
    return Path(folder, f"{number:03d}-{re.sub('[^A-Za-z0-9.=]+', '-', str(what))}")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[Path]:
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


def _run(
    entry: str,
    spec: str,
    deadline_s: float,
    folder: Path,
    env: dict[str, str],
    stop: threading.Event | None,
    watch: Callable[[int], str] | None,
    python: str | None,
) -> Outcome:
    (folder / "spec.json").write_text(spec, encoding="utf-8")
    (folder / "result.json").unlink(missing_ok=True)
    cookie = family.new_cookie()
    kills_before = kernel_kills()
    started = time.monotonic()
    with open(folder / "stdout.txt", "wb") as out, open(folder / "stderr.txt", "wb") as err:
        process = subprocess.Popen(
            [
                *(python or sys.executable, "-X", "faulthandler", "-m", "nsa.lab.process.child"),
                *(entry, str(folder / "spec.json"), str(folder / "result.json")),
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env=_environment(env, cookie, python),
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
                # Who watches has looked already.
                seen = "" if watch is not None else _stacks(process, folder / "stderr.txt")
                roots = family.family(cookie, roots)  # while it still leads to all of them
                _terminate(process)
                break
            time.sleep(_POLL_S)
    finally:
        seconds = time.monotonic() - started
        if process.returncode is not None:
            roots = roots - {process.pid}  # reaped, so the number may be somebody else's by now
        family.end_family(cookie, roots)
        process.wait()
    if seen is not None:
        return Outcome("timeout", None, seconds, late, process.returncode, seen)
    return _judge(entry, process.returncode, folder, seconds, kills_before)


def _judge(
    entry: str, returncode: int, folder: Path, seconds: float, kills_before: int | None
) -> Outcome:
    try:
        left = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        left = {}
    if left.get("status") == "bad entry":
        raise ValueError(f"{entry!r} cannot be run: {left['message']}")
    if returncode < 0:
        name = family.signal_name(-returncode)
        evidence = _tail(folder / "stderr.txt")
        killed = returncode == -signal.SIGKILL and (kernel_kills() or 0) > (kills_before or 0)
        if killed:
            message = "killed by the kernel: the host's memory, or this group's, was used up"
            return Outcome("oom", None, seconds, message, returncode, evidence)
        return Outcome("crash", None, seconds, f"ended by {name}", returncode, evidence)
    if not left:
        message = f"exited with {returncode} before it had a result"
        return Outcome("error", None, seconds, message, returncode, _tail(folder / "stderr.txt"))
    if left["status"] == "ok":
        return Outcome("ok", left["result"], seconds, "", returncode)
    return Outcome(left["status"], None, seconds, left["message"], returncode, left["traceback"])


def _environment(env: dict[str, str], cookie: str, python: str | None) -> dict[str, str]:
    given = family.environment({**os.environ, **env}, cookie)
    places = [os.path.abspath(place) for place in sys.path]
    if python is not None:
        own = [os.path.abspath(place) for place in sysconfig.get_paths().values()]
        places = [place for place in places if not place.startswith(tuple(own))]
    return given | {child.PATH: json.dumps(places)}


def _stacks(process: subprocess.Popen, stderr: Path) -> str:
    with contextlib.suppress(OSError):
        return looks.asked(process.pid, stderr)[: 4 * _TAIL_BYTES]
    return ""


def _terminate(process: subprocess.Popen) -> None:
    with contextlib.suppress(OSError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_TERM_S)


def check_entry(entry: str) -> None:
    """ValueError unless `entry` is "package.module:function" of a module that can be found."""
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


def _tail(file: Path) -> str:
    with open(file, "rb") as stream:
        stream.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        return stream.read().decode(errors="replace")
