"""Selfcheck of the lab: run every fault and program that this machine can run, and judge it blind.

The judge gets the evidence without anything that names what was planted: neither the subject nor
its settings, nor the files and classes in a stack.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from whyhung.process import runner, trial
from whyhung.process.told import ACCUSES
from whyhung.verdict import Verdict, judge
from whyhung.verdict.explain import page
from whyhung.watch.evidence import Evidence
from workbook.lab import attached, oracles
from workbook.lab.training import TrainingSpec
from workbook.rooms.selfcheck.judged import LATE, NOTHING, Judged, blind
from workbook.rooms.selfcheck.registry import Fault, chosen, why_not
from workbook.runs import environment

STALL_S = 5.0
# A program's name reveals what it is: it runs under another name, in a separate folder, beside a
# copy of what it shares with others.
NAMELESS = (
    "sh",
    "-c",
    'cp "$1" subject.py && cp "${1%/*}/_shared.py" . && shift && exec "$@"',
    "sh",
)
ORACLES = (*oracles.CHEAP, "checkpoint", "quadratic")  # those independent of what is planted
HEAD = 5  # lines of a page that must contain the user's line
# It ends when this process does, for whatever reason.
BUSY = "import os\nwhile os.getppid() == {}: pass"


def slack(load: int) -> int:
    """Factor by which deadlines are extended beside this many busy loops."""
    return 4 if load > 8 else 2 if load > 1 else 1


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise ValueError for notebook parameters that cannot be run."""
    chosen(values["only"], values["groups"])
    how = {"preset": values["counted_preset"], "precision": values["counted_dtype"]}
    for name in ("counted", "foretold"):
        sizes = {size: values[f"{name}_{size}"] for size in ("layers", "tokens")}
        TrainingSpec(backend=values[name], **sizes, **how)


def check(
    faults: Iterable[Fault],
    *,
    rounds: int = 1,
    workers: int = 3,
    load: int = 0,
    part: tuple[int, int] = (1, 1),
    budget_s: float | None = None,
    scale: float = 1.0,
    gpus: int | None = None,
    folder: str | Path | None = None,
    say: Callable[[Judged], None] = lambda row: None,
    stop: threading.Event | None = None,
) -> list[Judged]:
    """Run and judge each of `faults`, in `rounds` rounds; return a row each, in order.

    workers: concurrent trials that mostly wait, beside one that computes or whose time counts.
    load: busy loops beside them. part: (2, 8) for the second of eight parts, each of which takes
    every eighth trial. budget_s: time after which no trial begins. scale: of the durations of
    healthy programs. gpus: number on this machine, from torch if None. folder: for the trials'
    evidence, one subfolder each (None: not kept). say: called with each row once judged.

    Raises ValueError for invalid numbers.
    """
    if rounds < 1 or workers < 1:
        raise ValueError(f"rounds={rounds} and workers={workers} must be at least 1")
    if load < 0 or not 1 <= part[0] <= part[1]:
        raise ValueError(f"load={load} must be at least 0, part={part[0]}/{part[1]} like 1/8")
    if gpus is None:
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    faults, stop = list(faults), stop or threading.Event()
    jobs = [(number, index) for number in range(1, rounds + 1) for index in range(len(faults))]
    jobs = jobs[part[0] - 1 :: part[1]]
    # Within a round the longest start first.
    order = sorted(jobs, key=lambda job: (job[0], -faults[job[1]].takes_s * faults[job[1]].ranks))
    rows: dict[tuple[int, int], Judged] = {}
    end = time.monotonic() + (budget_s or float("inf"))

    def planted(number: int, index: int) -> Judged:
        if time.monotonic() > end:
            return _row(faults[index], number, load, found=NOTHING, skipped=LATE)
        # The folder's number reveals nothing about what is planted.
        place = Path(root, f"round-{number}", f"{index:03d}")
        options = {"round": number, "load": load, "scale": scale, "stop": stop}
        return plant(faults[index], folder=place, **options)

    temporary = partial(tempfile.TemporaryDirectory, prefix="nsa-selfcheck-")
    with (
        temporary() if folder is None else nullcontext(folder) as root,
        busy_loops(load),
        ThreadPoolExecutor(1) as one,
        ThreadPoolExecutor(workers) as many,
    ):
        running = {}
        for number, index in order:
            fault = faults[index]
            if skipped := why_not(fault, gpus):
                rows[number, index] = _row(fault, number, load, found=NOTHING, skipped=skipped)
                continue
            # One trial at a time uses a device, or computes on the core.
            pool = one if fault.busy or fault.needs else many
            running[pool.submit(planted, number, index)] = number, index
        try:
            for future in as_completed(running):
                rows[running[future]] = row = future.result()
                say(row)
        except BaseException:
            stop.set()  # running trials end themselves; waiting ones must not begin
            for pool in (one, many):
                pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [rows[job] for job in jobs]


def plant(
    fault: Fault,
    *,
    folder: str | Path,
    round: int = 1,
    load: int = 0,
    scale: float = 1.0,
    stop: threading.Event | None = None,
) -> Judged:
    """Run one trial of the fault and judge it blind; its evidence stays in `folder`.

    A certificate ends it, and so does a stall, except for a healthy one, which may continue.
    """
    began = time.monotonic()
    times = 1 if fault.predicted_s else slack(load)  # slow programs are slower beside others
    limits = {"deadline_s": times * fault.deadline_s, "stall_s": STALL_S, "on_hang": "kill"}
    limits |= {"on_stall": "report" if fault.control else "kill"}
    if fault.command:
        evidence = watched(fault, Path(folder), scale, stop or threading.Event(), **limits)
    else:
        limits |= {"predicted_s": fault.predicted_s, "attached": attached.PATH}
        with _company(folder) if fault.beside else nullcontext():
            evidence = runner.run(spec(fault), folder=folder, stop=stop, **limits)
        Path(folder, "evidence.json").write_text(json.dumps(evidence.to_dict()), encoding="utf-8")
    evidence = blind(evidence, fault)
    verdict = judge(evidence)
    told = [
        {"label": one["label"], "rested_s": one["rested_s"], "withdrawn": bool(one["withdrawn"])}
        for one in evidence.reports
        if one["label"].startswith(ACCUSES)
    ]
    return _row(
        fault,
        round,
        load,
        found=verdict.kind,
        found_what=verdict.what,
        **{name: getattr(verdict, name) for name in ("rule", "because", "place")},
        named_s=_named_s(evidence, verdict),
        seconds=time.monotonic() - began,
        line_named=_line_named(fault, page(evidence, verdict)),
        reports=tuple(told),
    )


def _named_s(evidence: Evidence, verdict: Verdict) -> float | None:
    """Time at rest when the verdict was reported or, without reports, could have been."""
    if "rested_s" not in verdict.numbers:
        return None
    told = [one["rested_s"] for one in evidence.reports if one["label"] == verdict.label]
    for t in () if told else [taken.t for taken in evidence.snapshots]:
        samples = [sample for sample in evidence.samples if sample.t <= t]
        taken = [snapshot for snapshot in evidence.snapshots if snapshot.t <= t]
        then = judge(replace(evidence, samples=samples, snapshots=taken, seconds=t, end=None))
        if then.label == verdict.label:
            told.append(then.numbers["rested_s"])
    return min(told, default=verdict.numbers["rested_s"])


def _line_named(fault: Fault, text: str) -> bool | None:
    """Return True if the head of its page names the line or rank to blame; None if none is due."""
    head = " ".join(" ".join(text.splitlines()[:HEAD]).split())
    due = [rf"\.py(:\d+)? {name}\b" for name in fault.line.split(" or ") if name]
    due += [] if fault.rank is None else [rf"\brank {fault.rank}\b"]
    return any(re.search(one, head) for one in due) if due else None


def watched(
    fault: Fault,
    folder: Path,
    scale: float,
    stop: threading.Event,
    *,
    deadline_s: float,
    stall_s: float,
    on_hang: str,
    on_stall: str,
) -> Evidence:
    """Run a program as a user would, and return the evidence that `whyhung watch` leaves."""
    from hang_runs import Run

    folder = folder.absolute()
    options = {"folder": folder, "limit": deadline_s, "stall-s": stall_s}
    options |= {"on-hang": on_hang, "on-stall": on_stall}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    program = ["subject.py" if word == fault.script else word for word in fault.command]
    watch = [sys.executable, "-m", "whyhung", "watch", *words, "--", *program]
    run = Run(
        [*NAMELESS, fault.script, *watch],
        folder,
        {"HANGS_SCALE": f"{scale:g}"} | _environment(fault),
    )
    try:
        while run.look() is None and not stop.is_set():
            time.sleep(0.2)
    finally:
        run.end()
    file = folder / "evidence.json"
    if not file.is_file():
        raise RuntimeError(f"{fault.name} left no evidence: {run.err().strip()[-500:]}")
    return Evidence.from_dict(json.loads(file.read_text(encoding="utf-8")))


def spec(fault: Fault) -> runner.Spec:
    """Spec of a trial, with the same oracles for all planted faults, which thus reveal nothing."""
    how = {"settings": fault.settings, "steps": fault.steps, "ranks": fault.ranks}
    asked = ORACLES if fault.group == "planted" else ()  # they would run the others again
    return runner.Spec(fault.subject, **how, oracles=asked, env=_environment(fault))


def _environment(fault: Fault) -> dict[str, str]:
    """Environment that hides GPUs from faults that need none, which may thus run beside others."""
    return {"OMP_NUM_THREADS": "1"} | ({} if fault.needs else {"CUDA_VISIBLE_DEVICES": ""})


def _row(fault: Fault, number: int, load: int, **found: object) -> Judged:
    same = ("name", "control", "due", "text", "group", "batch", "certifiable")
    known = {name: getattr(fault, name) for name in same}
    device = environment.devices()["cuda" if fault.needs else "cpu"]
    return Judged(round=number, load=load, device=device, **known, **found)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run this many processes that compute endlessly, within this context."""
    command = [sys.executable, "-S", "-c", BUSY.format(os.getpid())]
    loops: list[subprocess.Popen] = []
    try:
        for _ in range(count):
            loops.append(subprocess.Popen(command, start_new_session=True))
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextmanager
def _company(folder: str | Path) -> Iterator[None]:
    """Run another process with memory on the device, within this context."""
    there, stop = Path(f"{folder}-beside").absolute(), threading.Event()
    holds = there / "holds"

    def beside() -> None:
        entry = "faults.devices:hold"
        with suppress(trial.Stopped):
            trial.run_child(entry, {"file": str(holds)}, deadline_s=120.0, folder=there, stop=stop)

    thread = threading.Thread(target=beside)
    thread.start()
    try:
        end = time.monotonic() + 60
        while not holds.exists():
            if time.monotonic() > end or not thread.is_alive():
                raise RuntimeError("the process beside the trial did not get its memory")
            time.sleep(0.1)
        yield
    finally:
        stop.set()
        thread.join()
