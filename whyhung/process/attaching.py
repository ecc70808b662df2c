"""Attach to a running job, and report what each of its ranks does or waits for.

The job is not changed: /proc is read, and py-spy pauses each process for milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from whyhung.process import procfs
from whyhung.process.family import stat
from whyhung.process.members import Members, first_of, is_python, place, ranks_of, variables
from whyhung.process.observer import Counted, Observer
from whyhung.verdict import Verdict, judge
from whyhung.verdict.activity import LOOKS
from whyhung.watch import devices, flight_recorder, inside, kernel
from whyhung.watch.evidence import Evidence

SAMPLE_S = 0.25
MOST_S = 1.5  # times the requested seconds at most: then fewer looks must do
FLIGHT_S = 3.0  # the job polls its pipe once a second
STALL_S = 0.5
PIPE, DUMP = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "/tmp/nccl_trace_rank_"
DUMPS = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
NEXT_TIME = (
    "what its collectives were: nothing records them where others can read it; `whyhung watch -- "
    f"COMMAND` does, or {PIPE}=/tmp/fr_ and TORCH_FR_BUFFER_SIZE=2000 when the job is started"
)
_LAUNCHERS = ("mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "slurmstepd", "hydra")


def attach(pid: int, *, all_ranks: bool = False, seconds: float = 6.0) -> tuple[Evidence, Verdict]:
    """Observe process `pid` and its descendants for `seconds`; return the evidence and verdict.

    all_ranks: observe every rank of its launch on this node; pid may be the launcher or any rank.
    HANG: a wait that can never end. STALLED: a quiet wait. SLOW:uncounted: work.

    Raises ValueError if there is no such process.
    """
    notes: list[str] = []
    pid, started = _found(pid, notes)
    root = _launch_of(pid) if all_ranks else pid
    told = variables(pid)
    if not told and not os.access(f"/proc/{pid}/environ", os.R_OK):
        notes.append(f"process {pid} is another user's: {kernel.HELP}")
    folder = _counters(pid, told)
    ranks = _ranks(root, pid, all_ranks, folder, notes)
    evidence = Evidence(
        spec={"attached": pid, "ranks": len(ranks())}, stall_s=STALL_S, wait_s=STALL_S, notes=notes
    )
    has_gpus = shutil.which("nvidia-smi") is not None
    gpus = devices.device_use(told.get("CUDA_VISIBLE_DEVICES")) if has_gpus else None
    with gpus or contextlib.nullcontext() as use:
        observer = Observer(evidence, ranks, use=use, works=False)
        evidence.flights |= _flights({r: one.pid for r, one in ranks().items()}, told, notes)
        _observe(observer, seconds)
    evidence.seconds = observer.t
    if not evidence.snapshots or not procfs.lives(pid, started):
        why = f"process {pid} ended after it had been looked at for {observer.t:.1f} s"
        return evidence, Verdict("INCONCLUSIVE", "ended", "it ended while it was looked at", [why])
    verdict = judge(evidence)
    taken = len(evidence.snapshots)
    if verdict.kind == "INCONCLUSIVE" and taken < LOOKS:
        why = f"{taken} looks of {LOOKS} were done in {observer.t:.1f} s; --seconds gives them more"
        return evidence, Verdict("INCONCLUSIVE", "too-few-looks", "looks take long here", [why])
    counts = any(one.file for one in ranks().values())
    if not counts and not evidence.flights and _is_distributed(evidence, told):
        verdict = replace(verdict, unknown=(*verdict.unknown, NEXT_TIME))
    return evidence, verdict


def _found(pid: int, notes: list[str]) -> tuple[int, int]:
    """Return the process ID and start time of `pid`; for a thread, those of its process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        leader = int(status.partition("Tgid:")[2].split()[0])
    except (OSError, ValueError, IndexError):
        raise ValueError(f"there is no process {pid} on this machine") from None
    if leader != pid:
        notes.append(f"{pid} is a thread of process {leader}, which is looked at")
    seen = procfs.process(leader)
    if seen is None:
        raise ValueError(f"process {leader} has just ended")
    if not seen.lives:
        parent = stat(Path(f"/proc/{leader}"))[1]
        raise ValueError(f"process {leader} has ended, and its parent {parent} has not taken note")
    if leader == os.getpid():
        raise ValueError(f"process {leader} is this one")
    if not is_python(leader):
        notes.append(f"process {leader} does not run Python: of itself there are no stacks")
    return leader, seen.started


def _launch_of(pid: int) -> int:
    """Return the launcher above a rank: the nearest with ranks below it, or with a launcher's name.

    Ancestors of the launcher, such as a script that starts several jobs, are not part of it.
    """
    nearest = None
    while not (below := ranks_of(kernel.family({0: pid}))) or place(variables(pid))[0].isdecimal():
        try:
            above = int(stat(Path(f"/proc/{pid}"))[1])
            name = Path(f"/proc/{above}/comm").read_text(errors="replace")
        except (OSError, ValueError):
            break
        launches = name.startswith(_LAUNCHERS)
        if above <= 1 or above == os.getpid() or not (is_python(above) or launches):
            break
        pid, nearest = above, nearest or above
        if launches:
            return pid
    return pid if below else nearest or pid


def _counters(pid: int, told: Mapping[str, str]) -> Path | None:
    """Return the folder of progress counters; None if not started with `inside.environment`."""
    given = told.get(inside.FOLDER)
    if not given:
        return None
    for folder in (Path(given), Path(f"/proc/{pid}/root{given}")):
        with contextlib.suppress(OSError):
            if any(folder.glob("progress-*.bin")):
                return folder
    return None


def _ranks(root: int, pid: int, all_ranks: bool, folder: Path | None, notes: list[str]):
    """Return Observer's `ranks` callable: {rank: Counted} of a whole launch, or of one process."""
    below = kernel.family({0: root})
    found = ranks_of(below)
    if all_ranks or (len(found) > 1 and pid not in found.values()):
        return Members(root, folder)
    own = next((rank for rank, one in found.items() if one == pid), None)
    size = variables(pid).get("WORLD_SIZE", "1")
    if own is not None and size != "1":
        notes.append(f"it is rank {own} of {size}; --all-ranks looks at all of this node")
    chosen = pid if own is not None else next(iter(found.values()), first_of(below, pid))
    rank = own if own is not None else next(iter(found), 0)
    file = folder / f"progress-{chosen}.bin" if folder else None
    seen = procfs.process(chosen)
    one = Counted(chosen, file if file and file.is_file() else None)
    gone = Counted(0, one.file)

    def ranks() -> dict[int, Counted]:
        same = seen is not None and procfs.lives(chosen, seen.started)
        return {rank: one if same else gone}

    return ranks


def _observe(observer: Observer, seconds: float) -> None:
    """Sample, and take as many looks as time allows, LOOKS + 1 if they fit."""
    every = seconds / (LOOKS + 1)
    taken, due = 0, 0.0
    while True:
        observer.sample()
        if not observer.standing():
            return
        if observer.t >= due:
            observer.look(native=observer.use is not None and taken == 1)
            taken, due = taken + 1, max(due + every, observer.t + SAMPLE_S)
        enough = taken > LOOKS or (taken == LOOKS and observer.t > seconds)
        if (observer.t >= seconds and enough) or observer.t > MOST_S * seconds:
            return
        time.sleep(SAMPLE_S)


def _is_distributed(evidence: Evidence, told: Mapping[str, str]) -> bool:
    return len(evidence.ranks()) > 1 or told.get("WORLD_SIZE", "1") != "1"


def _flights(
    pids: Mapping[int, int], told: Mapping[str, str], notes: list[str]
) -> dict[int, list[dict[str, Any]]]:
    """Return NCCL's Flight Recorders, if the job was started with a pipe for them."""
    if not told.get(PIPE):
        return {}
    asked, found = {}, {}
    stem = next((told[name] for name in DUMPS if told.get(name)), DUMP)
    for rank, pid in pids.items():
        base = f"/proc/{pid}/root"
        file = Path(f"{base}{stem}{rank}")
        try:
            before = file.stat().st_mtime_ns if file.exists() else 0
            pipe = os.open(f"{base}{told[PIPE]}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            notes.append(f"rank {rank}'s Flight Recorder cannot be asked: {error.strerror}")
            continue
        with os.fdopen(pipe, "wb", buffering=0) as opened, contextlib.suppress(OSError):
            opened.write(b"1\n")
            asked[rank] = file, before
    end = time.monotonic() + FLIGHT_S
    while asked.keys() - found.keys() and time.monotonic() < end:
        time.sleep(0.1)
        for rank, (file, before) in asked.items():
            with contextlib.suppress(OSError, ValueError):  # it may be half written
                if rank not in found and file.stat().st_mtime_ns > before:
                    dumped = flight_recorder.loads(file.read_bytes())
                    found[rank] = flight_recorder.kept(flight_recorder.entries(dumped))
    return found
