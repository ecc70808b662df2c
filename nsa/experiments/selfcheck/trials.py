"""The lab checks itself: plants every fault that this machine can hold, and judges it blind.

The judge gets the evidence without anything that names what was planted: neither the subject nor
its settings, nor the files and classes that a stack shows.
"""

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from nsa.experiments.selfcheck.faults.registry import FAULTS, Fault, why_not
from nsa.experiments.selfcheck.judged import NOTHING, Judged, blind, line
from nsa.lab import oracles
from nsa.lab.process import runner, trial
from nsa.lab.verdict import judge
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
    say: Callable[[str], None] = lambda text: None,
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
    if gpus is None:
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    faults, stop = list(faults), stop or threading.Event()
    jobs = [(number, index) for number in range(1, rounds + 1) for index in range(len(faults))]
    # Within a round the longest begin.
    order = sorted(jobs, key=lambda job: (job[0], -faults[job[1]].takes_s * faults[job[1]].ranks))
    rows: dict[tuple[int, int], Judged] = {}

    def planted(number: int, index: int) -> Judged:
        # The folder's number tells nothing of what is planted.
        place = Path(root, f"round-{number}", f"{index:02d}")
        return plant(faults[index], folder=place, round=number, stop=stop)

    temporary = partial(tempfile.TemporaryDirectory, prefix="nsa-selfcheck-")
    with (
        temporary() if folder is None else nullcontext(folder) as root,
        ThreadPoolExecutor(1) as one,
        ThreadPoolExecutor(workers) as many,
    ):
        running = {}
        for number, index in order:
            fault = faults[index]
            if skipped := why_not(fault, gpus):
                rows[number, index] = _row(fault, number, found=NOTHING, skipped=skipped)
                continue
            # A device is one trial's at a time, as the core is of one that computes.
            pool = one if fault.busy or fault.needs else many
            running[pool.submit(planted, number, index)] = number, index
        try:
            for future in as_completed(running):
                rows[running[future]] = row = future.result()
                say(line(row))
        except BaseException:
            stop.set()  # what runs ends itself; what waits must not begin
            for pool in (one, many):
                pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [rows[job] for job in jobs]


def plant(
    fault: Fault, *, folder: str | Path, round: int = 1, stop: threading.Event | None = None
) -> Judged:
    """One trial of the fault, judged blind; its evidence stays in `folder`."""
    began = time.monotonic()
    limits = {"predicted_s": fault.predicted_s, "deadline_s": fault.deadline_s, "stall_s": STALL_S}
    with _company(folder) if fault.beside else nullcontext():
        evidence = runner.run(spec(fault), folder=folder, stop=stop, **limits)
    Path(folder, "evidence.json").write_text(json.dumps(evidence.to_dict()), encoding="utf-8")
    verdict = judge(blind(evidence, fault))
    return _row(
        fault,
        round,
        found=verdict.kind,
        found_what=verdict.what,
        **{name: getattr(verdict, name) for name in ("rule", "because", "place")},
        named_s=verdict.numbers.get("rested_s") if verdict.kind == "HANG" else None,
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
    how = {"settings": fault.settings, "steps": fault.steps, "ranks": fault.ranks}
    env = {} if fault.needs else {"CUDA_VISIBLE_DEVICES": ""}
    return runner.Spec(fault.subject, **how, oracles=ORACLES, env=env)


def _row(fault: Fault, number: int, **found: Any) -> Judged:
    planted = (fault.name, fault.control, fault.kinds, fault.what)
    return Judged(*planted, round=number, text=fault.text, **found)


@contextmanager
def _company(folder: str | Path) -> Iterator[None]:
    """Another process with memory on the device, for as long as this lasts."""
    there, stop = Path(f"{folder}-beside").absolute(), threading.Event()
    holds = there / "holds"

    def beside() -> None:
        entry = "nsa.experiments.selfcheck.faults.devices:hold"
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
