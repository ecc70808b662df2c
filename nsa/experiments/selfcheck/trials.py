"""The lab checks itself: plants every fault that this machine can hold, and judges it blind.

The judge gets the evidence without anything that names what was planted: neither the subject nor
its settings, nor the files and classes that a stack shows.
"""

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from nsa.experiments.selfcheck.faults.registry import FAULTS, Fault, why_not
from nsa.experiments.selfcheck.judged import NOTHING, Judged, blind, line
from nsa.lab import oracles
from nsa.lab.process import runner, trial
from nsa.lab.verdict import Verdict, judge
from nsa.lab.verdict.pace import fraction
from nsa.lab.watch.evidence import Evidence

STALL_S = 5.0
ORACLES = (*oracles.CHEAP, "checkpoint", "quadratic")  # all that need no word of what is planted


def check(
    faults: Iterable[Fault] = FAULTS,
    *,
    rounds: int = 1,
    workers: int = 3,
    gpus: int | None = None,
    folder: str | Path | None = None,
    say: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
) -> list[Judged]:
    """Plants and judges each of `faults`, in `rounds` rounds; a row each, in their order.

    workers: how many that mostly wait are run at once, beside one that computes or whose time
    counts. gpus: of this machine, asked of torch where None. folder: where the trials' evidence is
    kept, one folder each (None: nowhere). say: told of each as it is judged.

    Raises ValueError for rounds or workers below 1.
    """
    if rounds < 1 or workers < 1:
        raise ValueError(f"rounds={rounds} and workers={workers} must be at least 1")
    faults = list(faults)
    if gpus is None:
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    stop = stop or threading.Event()
    with _place(folder) as root:
        rows = []
        for number in range(1, rounds + 1):
            place = Path(root, f"round-{number}")
            rows += _round(faults, number, workers, gpus, place, say or _silent, stop)
        return rows


def _round(
    faults: Sequence[Fault],
    number: int,
    workers: int,
    gpus: int,
    root: Path,
    say: Callable[[str], None],
    stop: threading.Event,
) -> list[Judged]:
    rows: dict[int, Judged] = {}
    waiting, alone = [], []
    for index, fault in enumerate(faults):
        skipped = why_not(fault, gpus)
        if skipped:
            rows[index] = _row(fault, number, skipped=skipped)
        else:
            (alone if fault.busy or fault.needs else waiting).append(index)
    # A device is one trial's at a time, as the core is of one that computes; the longest begin.
    alone.sort(key=lambda index: -faults[index].takes_s)
    waiting.sort(key=lambda index: -faults[index].takes_s * faults[index].ranks)

    def planted(index: int) -> tuple[int, Judged]:
        # The folder's number tells nothing of what is planted.
        return index, plant(faults[index], folder=root / f"{index:02d}", round=number, stop=stop)

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(workers) as many:
        running = {one.submit(planted, index) for index in alone}
        running |= {many.submit(planted, index) for index in waiting}
        try:
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    index, rows[index] = future.result()
                    say(line(rows[index]))
        except BaseException:
            stop.set()  # what runs ends itself; what waits must not begin
            for pool in (one, many):
                pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [rows[index] for index in range(len(faults))]


def plant(
    fault: Fault, *, folder: str | Path, round: int = 1, stop: threading.Event | None = None
) -> Judged:
    """One trial of the fault, judged blind; its evidence stays in `folder`."""
    began = time.monotonic()
    with _company(folder) if fault.beside else nullcontext():
        evidence = runner.run_until_proven(
            spec(fault),
            folder=folder,
            predicted_s=fault.predicted_s,
            deadline_s=fault.deadline_s,
            stall_s=STALL_S,
            stop=stop,
        )
    Path(folder, "evidence.json").write_text(json.dumps(evidence.to_dict()), encoding="utf-8")
    verdict = judge(blind(evidence, fault))
    return _row(
        fault,
        round,
        verdict=verdict,
        seconds=time.monotonic() - began,
        track=track(evidence, verdict.numbers.get("rank", 0)),
    )


def track(evidence: Evidence, rank: int = 0, points: int = 200) -> tuple[tuple[float, float], ...]:
    """(seconds since its first step, share of its steps done), thinned evenly to so many points."""
    steps = int(evidence.spec.get("steps") or 0)
    seen = [sample for sample in evidence.of(rank) if sample.p.step >= 0]
    kept = seen[:: -(-len(seen) // points) or 1]
    if seen and kept[-1] is not seen[-1]:
        kept.append(seen[-1])
    return tuple((round(s.t - seen[0].t, 2), round(fraction(s.p, steps), 4)) for s in kept)


def spec(fault: Fault) -> runner.Spec:
    """What is run: the same oracles for all, so that they tell nothing of what is planted.

    What needs no GPU sees none, so that it may run beside a trial that does.
    """
    return runner.Spec(
        subject=fault.subject,
        settings=fault.settings,
        steps=fault.steps,
        ranks=fault.ranks,
        oracles=ORACLES,
        env={} if fault.needs else {"CUDA_VISIBLE_DEVICES": ""},
    )


def _row(fault: Fault, number: int, *, verdict: Verdict | None = None, **more: Any) -> Judged:
    of_fault = {
        "name": fault.name,
        "control": fault.control,
        "expected": fault.kinds,
        "what": fault.what,
        "text": fault.text,
        "round": number,
    }
    if verdict is None:
        return Judged(**of_fault, found=NOTHING, **more)
    rested = verdict.numbers.get("rested_s") if verdict.kind == "HANG" else None
    return Judged(
        **of_fault,
        found=verdict.kind,
        found_what=verdict.what,
        rule=verdict.rule,
        because=verdict.because,
        place=verdict.place,
        named_s=rested,
        **more,
    )


@contextmanager
def _company(folder: str | Path):
    """Another process with memory on the device, for as long as this lasts."""
    there, stop = Path(f"{folder}-beside"), threading.Event()
    thread = threading.Thread(target=_beside, args=(there, stop))
    thread.start()
    try:
        end = time.monotonic() + 60
        while not (there / "holds").exists():
            if time.monotonic() > end or not thread.is_alive():
                raise RuntimeError("the process beside the trial did not get its memory")
            time.sleep(0.1)
        yield
    finally:
        stop.set()
        thread.join()


def _beside(folder: Path, stop: threading.Event) -> None:
    try:
        trial.run_child(
            "nsa.experiments.selfcheck.faults.devices:hold",
            {"file": str(folder.absolute() / "holds")},
            deadline_s=120.0,
            folder=folder,
            stop=stop,
        )
    except trial.Stopped:
        return


@contextmanager
def _place(folder: str | Path | None):
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="nsa-selfcheck-") as temporary:
        yield temporary


def _silent(text: str) -> None:
    """Nobody wants to be told."""
