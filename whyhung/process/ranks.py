"""Run one function on several ranks of one host under torchrun, and report how each ended.

`python -m whyhung.process.ranks RANKS PORT FOLDER REDIRECTS MODULE ARG...` is torchrun as a
function. It runs `python -m MODULE ARG...` as RANKS processes of this host and writes to FOLDER
exits.json: {"codes": exit codes by rank of those that failed, "first": the first of them}. PORT 0
finds a free one. torchrun's own messages go to FOLDER/torchrun.log. REDIRECTS 3 puts the ranks'
output below FOLDER/logs, 0 leaves them this process's standard output and error.
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from whyhung.process import child, family, trial

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
    """Call `entry` ("package.module:function") with `spec` in `ranks` processes under torchrun.

    Returns one row per rank: rank; status "ok", "oom", "error", "crash" (ended by a signal),
    "timeout" (still running at the deadline) or "ended" (terminated because another rank had
    failed); result, for "ok" only; message; evidence, the traceback's tail, the stacks at the
    deadline or the tail of stderr; place, the last one it reported; first, True for the first to
    fail; raised, True if the message is its exception's; seconds, of the launch. `folder` keeps
    the files and the output of each rank. All processes are gone at the end.

    `watch` and `python` are those of `trial.run_child`.

    Raises ValueError if ranks < 1, and wherever `trial.run_child` does.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    trial.check_entry(entry)
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in (
        "exits.json",
        "rank-*.json",
        "place-*.json",
        "stacks-*.txt",
        "logs/*/*/*/*.log",
    ):
        for left in folder.glob(pattern):
            left.unlink()
    given = {"entry": entry, "spec": spec, "ranks": ranks, "folder": str(folder)}
    cut: list[float] = []  # when it was ended from here: later errors of ranks are our doing

    def watched(pid: int) -> str:
        reason = watch(pid) if watch is not None else ""
        if reason:
            cut.append(time.time())
        return reason

    launched = trial.run_child(
        "whyhung.process.ranks:launch",
        given | {"deadline_s": deadline_s},
        deadline_s=deadline_s + _MARGIN_S,
        folder=folder / "launch",
        env={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **(env or {})},
        stop=stop,
        watch=watched if watch is not None else None,
        python=python,
    )
    return _rows(launched, ranks, folder, min(cut, default=None))


def launch(spec: dict) -> dict:
    """Run torchrun itself, with a deadline, in a child process.

    Returns {"late": time at which the deadline passed, None if it ended before, "stderr"}.
    """
    folder = Path(spec["folder"])
    spec_file = folder / "ranks.json"
    spec_file.write_text(json.dumps(spec["spec"], indent=1), encoding="utf-8")
    command = [
        *(sys.executable, "-m", "whyhung.process.ranks", str(spec["ranks"]), "0", str(folder)),
        *("3", "whyhung.process.child", spec["entry"], str(spec_file), str(folder)),
    ]
    end = time.monotonic() + spec["deadline_s"]
    paths = os.pathsep.join(filter(None, sys.path))  # ranks find the modules that we find
    env = {**os.environ, "PYTHONPATH": paths, family.PARENT: str(os.getpid())}
    process = subprocess.Popen(command, env=env)
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    late = process.poll() is None
    ended = time.time()
    if late:
        for place in folder.glob("place-*.json"):
            try:
                os.kill(json.loads(place.read_text())["pid"], signal.SIGUSR1)
            except (OSError, ValueError):
                continue  # it has just ended
        time.sleep(_STACK_S)
    log = folder / "torchrun.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return {"late": ended if late else None, "stderr": text[-_TAIL:]}


def exits(folder: Path) -> tuple[dict[int, int], int | None]:
    """Return (exit codes of ranks that torchrun saw fail, by rank; the first of them, if known)."""
    found = child.read(Path(folder, "exits.json"), {})
    return {int(rank): code for rank, code in found.get("codes", {}).items()}, found.get("first")


def main(ranks: str, port: str, folder: str, redirects: str, module: str, *arguments: str) -> int:
    """Run the ranks under torchrun; return 0 if every rank succeeded, else 1."""
    family.die_with_parent()
    # before torch creates its log handlers
    sys.stderr = open(Path(folder, "torchrun.log"), "w", buffering=1)  # noqa: SIM115
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(ranks))))
    free = port == "0"
    rendezvous = ("c10d", "is_host=True") if free else ("static", "rank=0")
    # An address of our own rather than the host's name, which need not resolve.
    told = ["--nproc-per-node", ranks, "--monitor-interval", "0.1", "--local-addr", "127.0.0.1"]
    told += ["--rdzv-backend", rendezvous[0], "--rdzv-conf", rendezvous[1]]
    told += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", uuid.uuid4().hex]
    if redirects != "0":
        told += ["--log-dir", str(Path(folder, "logs")), "--redirects", redirects]
    try:
        run.run(run.parse_args([*told, "-m", module, *arguments]))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        child.put(
            Path(folder, "exits.json"), {"codes": codes, "first": error.get_first_failure()[0]}
        )
        print(error, file=sys.stderr)
        return 1
    except SignalException:
        return 1
    return 0


def _rows(
    launched: trial.Outcome, ranks: int, folder: Path, cut: float | None = None
) -> list[dict]:
    said = launched.result or {"late": None, "stderr": launched.evidence}
    if launched.status == "timeout":
        said["late"] = cut or time.time()
    codes, named = exits(folder)
    rows = [_row(rank, said, codes.get(rank), launched, folder) for rank in range(ranks)]
    first = _first(rows, named)
    for row in rows:
        row["first"] = row["rank"] == first
        row["seconds"] = launched.seconds
        row["raised"] = row.pop("time") is not None
        del row["code"]
    return rows


def _row(rank: int, said: dict, code: int | None, launched: trial.Outcome, folder: Path) -> dict:
    left = child.read(folder / f"rank-{rank}.json", {})
    place = child.read(folder / f"place-{rank}.json", {}).get("place", "before its start")
    row = {"rank": rank, "place": place, "result": None, "message": "", "evidence": "",
           "time": None, "code": code}  # fmt: skip
    if left.get("status") != "ok" and left.get("time", 0.0) > (said["late"] or math.inf):
        left = {}  # it lost the others, or was interrupted, as all were ended
    if left.get("status") == "ok":
        return row | {"status": "ok", "result": left["result"]}
    if left:
        status, message, evidence = left["status"], left["message"], left["traceback"]
        row["time"] = left["time"]
    elif said["late"]:
        status, message = "timeout", f"still running at the deadline, at: {place}"
        stacks = folder / f"stacks-{rank}.txt"
        evidence = stacks.read_text(errors="replace") if stacks.is_file() else ""
    else:
        evidence = _tail(rank, folder) or said["stderr"] or launched.message
        if code == -signal.SIGTERM:
            status, message = "ended", f"ended because another rank had failed, at: {place}"
        elif code is not None and code < 0:
            status, message = "crash", f"ended by {family.signal_name(-code)}"
        else:
            status = "error"
            message = launched.message or f"exited with {code} before it had a result"
    return row | {"status": status, "message": message, "evidence": evidence}


def _first(rows: list[dict], named: int | None) -> int | None:
    """Return the rank at fault: one ended by a signal, else one that raised, else one that exited.

    Ranks that lost their connection to it, or waited for it, are only witnesses. None if all that
    failed are, and another had returned or was ended before it could report anything. named: the
    first by torchrun.
    """
    witnesses = [row["rank"] for row in rows if is_witness(row)]
    own = [row for row in rows if row["rank"] not in witnesses]
    crashed = [row["rank"] for row in own if row["status"] == "crash"]
    if crashed:
        return named if named in crashed else crashed[0]
    raised = [(row["time"], row["rank"]) for row in own if row["time"] is not None]
    if raised:
        return min(raised)[1]
    exited = [row["rank"] for row in own if row["status"] == "error" and row["code"] is not None]
    if exited:
        return named if named in exited else exited[0]
    if witnesses and len(witnesses) < len(rows):
        return None
    noticed = [(row["time"] or math.inf, row["rank"]) for row in rows if is_witness(row)]
    return min(noticed)[1] if noticed else named


def is_witness(row: dict) -> bool:
    """Return True if a rank ended because it lost another, which is not its own fault."""
    if row["status"] == "error" and row["time"] is not None:
        return child.lost_another(row["message"])
    # NCCL's watchdog, and C++ exceptions in a thread, abort a process
    aborted = row["status"] == "crash" and row["message"].endswith("SIGABRT")
    return aborted and child.lost_another(row["evidence"])


def _tail(rank: int, folder: Path) -> str:
    logs = sorted(folder.glob(f"logs/*/*/{rank}/stderr.log"))
    return logs[-1].read_text(encoding="utf-8", errors="replace")[-_TAIL:] if logs else ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
