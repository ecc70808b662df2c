"""One function on several ranks of one host, under torchrun, and how each rank ended."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nsa.lab.process import child, family, trial
from nsa.lab.process.launch import torchrun

_STACK_S = 1.0
_MARGIN_S = 5.0  # between the moment when stacks are taken and the end of the launch
_TAIL = 4000


def run_ranks(
    entry: str,
    spec: dict,
    *,
    ranks: int,
    deadline_s: float,
    folder: str | Path,
    env: dict[str, str] | None = None,
    stop: threading.Event | None = None,
    watch: Callable[[int], str] | None = None,
    python: str | None = None,
) -> list[dict]:
    """Calls `entry` ("package.module:function") with `spec` in `ranks` processes under torchrun.

    One row a rank: rank; status "ok", "oom", "error", "crash" (ended by a signal), "timeout" (still
    running at the deadline) or "ended" (taken down because another rank had failed); result, for
    "ok" only; message; evidence, the traceback's tail, the stacks at the deadline or the tail of
    stderr; place, where it last said to stand; first, whether it was the first to fail; raised,
    whether the message is its exception's; seconds, of the launch. `folder` keeps what each rank
    wrote and printed. All processes are gone at the end.

    `watch` and `python` are those of `trial.run_child`.

    Raises ValueError for a number of ranks below 1 and for what `trial.run_child` refuses.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    trial.check_entry(entry)
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("rank-*.json", "place-*.json", "stacks-*.txt", "logs/*/*/*/*.log"):
        for left in folder.glob(pattern):
            left.unlink()
    end = time.monotonic() + deadline_s

    def late(pid: int) -> str:
        if reason := watch(pid) if watch is not None else "":
            return reason
        if time.monotonic() < end:
            return ""
        for place in folder.glob("place-*.json"):
            with contextlib.suppress(OSError, ValueError):  # it has just ended
                os.kill(json.loads(place.read_text())["pid"], signal.SIGUSR1)
        time.sleep(_STACK_S)
        return f"still running after {deadline_s:g} s"

    launched = trial.run_child(
        "nsa.lab.process.ranks:launch",
        {"entry": entry, "spec": spec, "ranks": ranks, "folder": str(folder)},
        deadline_s=deadline_s + _MARGIN_S,
        folder=folder / "launch",
        env={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **(env or {})},
        stop=stop,
        watch=late,
        python=python,
    )
    codes = dict((launched.result or {"codes": ()})["codes"])
    rows = [_row(rank, codes.get(rank), launched, folder) for rank in range(ranks)]
    first = _first(rows, next(iter(codes), None))
    for row in rows:
        row["first"] = row["rank"] == first
        row["seconds"] = launched.seconds
        row["raised"] = row.pop("time") is not None
    return rows


def launch(spec: dict) -> dict:
    """torchrun, in a child process: {"codes": (rank, exit code) of those that it saw fail}."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    folder = Path(spec["folder"])
    child.put(folder / "ranks.json", spec["spec"], indent=1)
    os.environ[family.PARENT] = str(os.getpid())
    arguments = [spec["entry"], str(folder / "ranks.json"), str(folder)]
    logs = DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL)
    # SIGTERM ends this process at once, and its ranks with it.
    options = {"logs_specs": logs, "signals_to_handle": "SIGINT"}
    codes = torchrun(spec["ranks"], "nsa.lab.process.child", arguments, **options)
    return {"codes": list(codes.items())}


def _row(rank: int, code: int | None, launched: trial.Outcome, folder: Path) -> dict:
    left = child.read(folder / f"rank-{rank}.json", {})
    place = child.read(folder / f"place-{rank}.json", {}).get("place", "before its start")
    row = {"rank": rank, "place": place, "result": None, "message": "", "evidence": "",
           "time": None}  # fmt: skip
    if left.get("status") == "ok":
        return row | {"status": "ok", "result": left["result"]}
    if left:
        status, message, evidence = left["status"], left["message"], left["traceback"]
        row["time"] = left["time"]
    elif launched.status == "timeout":
        status, message = "timeout", f"still running at the deadline, at: {place}"
        evidence = _text(folder / f"stacks-{rank}.txt")
    else:
        logs = sorted(folder.glob(f"logs/*/*/{rank}/stderr.log"))
        said = launched.evidence or _text(folder / "launch" / "stderr.txt")
        evidence = (_text(logs[-1]) if logs else "")[-_TAIL:] or said[-_TAIL:] or launched.message
        if code == -signal.SIGTERM:
            status, message = "ended", f"ended because another rank had failed, at: {place}"
        elif code is not None and code < 0:
            status, message = "crash", f"ended by {family.signal_name(-code)}"
        else:
            status = "error"
            message = launched.message or f"exited with {code} before it had a result"
    return row | {"status": status, "message": message, "evidence": evidence}


def _first(rows: list[dict], named: int | None) -> int | None:
    """A rank that a signal ended went before those whose connection to it broke.

    named: the first that torchrun saw fail.
    """
    crashed = [row["rank"] for row in rows if row["status"] == "crash"]
    if crashed:
        return named if named in crashed else crashed[0]
    raised = sorted((row["time"], row["rank"]) for row in rows if row["time"] is not None)
    return raised[0][1] if raised else named


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
