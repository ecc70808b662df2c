"""Child process of a trial: `python -X faulthandler -m whyhung.process.child ENTRY SPEC RESULT`.

Calls ENTRY ("package.module:function") with the JSON object in the file SPEC and writes to the file
RESULT {"status": "ok", "result": ...}, or the status "oom" or "error" with a message, the
traceback's tail and the time, and "refused" if there is no such function. If RESULT is a folder,
this is rank K of several: it writes rank-K.json there, its current place to place-K.json, and on
SIGUSR1 the stack of every thread to stacks-K.txt. All JSON files are written atomically. Imports
as little as possible.
"""

import contextlib
import errno
import faulthandler
import importlib
import json
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path

from whyhung.process.family import die_with_parent, let_others_look

PATH = "NSA_TRIAL_PATH"
FOLDER = "NSA_RANK_FOLDER"
SO_FAR = "NSA_TRIAL_SO_FAR"  # file of a trial's unfinished result
TAIL_LINES = 30
_HERE = os.path.dirname(__file__)
_NO_MEMORY = (
    "out of memory",  # CUDA, HIP, Triton
    "can't allocate memory",  # torch's CPU allocator
    "cublas_status_alloc_failed",
)
# Messages of a rank that lost another, or waited for it in vain.
_LOST = re.compile(
    r"DistNetworkError|connection (was |has been )?(likely )?(reset|closed|refused|aborted|lost)"
    r"|broken pipe|socket (closed|timeout)|remote process exited|ncclRemoteError|ncclSystemError"
    r"|failed to (recv|send)|recv(Value)? failed|sendBytes failed|pair closure"
    r"|timed out waiting|watchdog caught collective|ranks? failed to (pass|reach)",
    re.IGNORECASE,
)
_ELSE = re.compile(r"\[Errno|HTTP|urllib|requests\.|\bssl\b", re.IGNORECASE)  # another network


def put(path: str | os.PathLike, content: dict, indent: int | None = None) -> None:
    """Write JSON atomically; concurrent readers see the previous content."""
    unfinished = Path(f"{os.fspath(path)}.{os.getpid()}.unfinished")
    unfinished.write_text(json.dumps(content, indent=indent), encoding="utf-8")
    unfinished.replace(path)


def read(path: str | os.PathLike, default: dict | None = None) -> dict | None:
    """Return the content written by `put`, or `default` if it cannot be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return default


def standing(place: str) -> None:
    """Report this rank's current place to the supervisor; no effect outside a launch."""
    if FOLDER in os.environ:
        content = {"place": place, "pid": os.getpid(), "since": time.time()}
        put(Path(os.environ[FOLDER], f"place-{os.environ['RANK']}.json"), content)


def so_far(result: dict) -> None:
    """Store what this trial has measured until now, for the case that it is ended before it
    returns; no effect outside a trial."""
    if SO_FAR in os.environ:
        put(os.environ[SO_FAR], result)


def failure(error: BaseException) -> dict:
    """Return an exception as a record: status, message, tail of the traceback, time.

    Frames that only lead to the trial's own are left out.
    """
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        file = trace.tb_frame.f_code.co_filename
        if os.path.dirname(file) != _HERE and not file.startswith("<frozen"):
            break
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace)).splitlines()
    return {
        "status": "oom" if is_out_of_memory(error) else "error",
        "message": f"{type(error).__name__}: {error}{notes}",
        "traceback": "\n".join(lines[-TAIL_LINES:]),
        "time": time.time(),
    }


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error`, or one that caused it, reports a failed memory allocation."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, MemoryError):
            return True
        if isinstance(current, OSError) and current.errno == errno.ENOMEM:
            return True
        # By name: trials that never import torch load this module too.
        if any(kind.__name__ == "OutOfMemoryError" for kind in type(current).__mro__):
            return True
        if isinstance(current, RuntimeError) and any(p in str(current).lower() for p in _NO_MEMORY):
            return True
        current = current.__cause__ or current.__context__
    return False


def lost_another(message: str) -> bool:
    """Return True if a rank's error reports only that another rank is gone or does not come."""
    return bool(_LOST.search(message)) and not _ELSE.search(message)


def resolve(entry: str):
    """Return the object that "package.module:name" names; None if the module has no such name."""
    module, _, name = entry.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def main(entry: str, spec_file: str, result: str) -> int:
    """Run the trial or the rank; return 0 if `entry` returned, else 1."""
    die_with_parent()
    let_others_look()
    # If memory runs out, the kernel then kills the trial rather than the notebook waiting for it.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    known = set(sys.path)
    sys.path += [place for place in json.loads(os.environ.get(PATH, "[]")) if place not in known]
    if os.path.isdir(result):
        folder, rank = result, os.environ["RANK"]
        result = os.path.join(folder, f"rank-{rank}.json")
        os.environ[FOLDER] = folder
        stacks = open(Path(folder, f"stacks-{rank}.txt"), "w")  # noqa: SIM115  as long as we live
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        standing("starting")
    else:
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # stacks of a late trial
    try:
        spec = json.loads(Path(spec_file).read_text(encoding="utf-8"))
        function = resolve(entry)
        if function is None:
            outcome = failure(AttributeError(f"{entry} is not there")) | {"refused": True}
        else:
            outcome = {"status": "ok", "result": function(spec)}
    except BaseException as error:  # SystemExit and KeyboardInterrupt end a trial like any other
        outcome = failure(error)
    try:
        put(result, outcome)
    except (TypeError, ValueError) as error:
        message = f"{entry} returned what JSON cannot hold: {error}"
        outcome = failure(error) | {"message": message}
        put(result, outcome)
    return 0 if outcome["status"] == "ok" else 1


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Tearing torch down takes as long as loading it, and threads of a process group that an error
    # left open would abort a plain exit.
    os._exit(code)
