"""The step-5 question as trials: the same healthy loop under deadlines, prints and observers.

The old rule is the case study's: a run that has not ended at the deadline hangs, at the step of its
last printed line. It is compared with the verdict from the evidence, and one trial with a planted
lock shows that verdict for a run that does hang.
"""

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from whyhung.process.gpus import Gpus
from whyhung.process.runner import Spec
from whyhung.verdict import Verdict
from whyhung.watch import read
from whyhung.watch.evidence import Evidence, P
from workbook.lab import sweep
from workbook.lab.search.bisection import Bisection
from workbook.lab.search.candidates import Found, Tried
from workbook.lab.search.ledger import Ledger
from workbook.rooms.case_study.loop.design import design
from workbook.rooms.case_study.loop.measure import ENTRY
from workbook.rooms.case_study.loop.subject import PrintSchedule, last_step

SUBJECT = "workbook.rooms.case_study.loop.subject:make"
SLOWS = {"tracing": 2.0, "aux_stats": 1.1, "blocking": 1.5}  # observers, and their slowdown
BASE = {"path": "loop", "layers": 1, "deadline": 1.0}
BASE |= {"aux_stats": False, "tracing": False, "blocking": False, "prints": (5, 20), "lock_at": 0}
# For the bisection; the first value is one that never looks like a hang. Its long deadline has room
# for observers on a machine that slows down: a trial that ends by itself uses no more of it.
FACTORS = {
    "path": ["masked", "loop"],
    "deadline": [20.0, 1.0],
    "tracing": [False, True],
    "aux_stats": [False, True],
    "prints": [(5, 1), (5, 20)],
}
# Factors that are varied alone.
PRINTS = {"no debug lines": (0, 20), "2 and every 3rd": (2, 3), "every step": (5, 1)}
OBSERVERS = {
    "aux stats": {"aux_stats": True},
    "tracing": {"tracing": True},
    "launch blocking": {"blocking": True},
}
# At the step of the case study's hang, under a deadline that leaves time for its certificate.
PLANTED = {"lock_at": 5, "deadline": FACTORS["deadline"][0]}


@dataclass(frozen=True)
class Setup:
    """design, tokens, device, seed and threads of every trial.

    steps: number of steps of a trial; allowed: length of the old deadline in steps.
    """

    design: str = "tiny"
    tokens: int = 192
    steps: int = 31
    allowed: float = 8.0
    device: str = "cpu"
    seed: int = 1337
    threads: int | None = 1

    def __post_init__(self) -> None:
        design(self.design)
        if not 5 < self.allowed < self.steps:
            raise ValueError(
                f"allowed={self.allowed} steps of {self.steps}: a deadline that cuts a run after "
                "its step 5 is longer than 5 steps and shorter than all"
            )


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise ValueError for values of the notebook's parameters that could not be run."""
    Setup(*(values[name] for name in ("design", "tokens", "steps", "allowed")))
    if not values["deadlines"]:
        raise ValueError("deadlines is empty; 1.0,2.0 would do, times the old deadline")


@dataclass(frozen=True)
class Trial:
    """One trial of the loop: its cell, its evidence and verdict, and its console at the end."""

    id: str
    cell: dict[str, Any]
    evidence: Evidence
    verdict: Verdict
    console: str
    last: P
    steps: int

    @property
    def finished(self) -> bool:
        return self.evidence.end is not None and self.evidence.end.how == "returned"

    @property
    def moves(self) -> bool:
        """True if it was cut while moving, according to its evidence."""
        return self.verdict.kind == "SLOW" and "rested_s" not in self.verdict.numbers

    @property
    def said(self) -> int | None:
        """Step of the last printed line."""
        return last_step(self.console)

    @property
    def old_verdict(self) -> str:
        """Verdict from a timeout and a console."""
        return "PASS" if self.finished else f"HANG at step {self.said}"

    @property
    def reached(self) -> int:
        """Step that it had reached, from 1."""
        return self.last.step + 1

    @property
    def schedule(self) -> PrintSchedule:
        return PrintSchedule(*self.cell["prints"])

    def expected(self) -> set[int | None]:
        """Last lines that the schedule allows for its progress; two while a line may be pending."""
        started = self.reached
        ended = started if self.finished or self.last.phase == "end" else started - 1
        lines = {self.schedule.last_line(started, ended)}
        if self.last.phase in ("data", "other"):
            lines.add(self.schedule.last_line(max(0, started - 1), ended))
        if self.last.phase in ("optimizer", "other"):
            lines.add(self.schedule.last_line(started, started))
        return lines


@dataclass
class Lab:
    """Runs cells into a ledger, with deadlines from a measured step time.

    gpus: one is lent to each trial. step_s: seconds a step, in a short trial without a deadline.
    """

    ledger: Ledger
    setup: Setup
    say: Callable[[Trial], None] = lambda trial: None
    gpus: Gpus = field(default_factory=Gpus)
    step_s: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def calibrate(self) -> None:
        """Measure the time of a step, which deadlines are multiples of."""
        steps = 8
        made = self._run(BASE, steps)
        if not made.finished:
            raise RuntimeError(f"the calibration did not end: {made.verdict.label}")
        self.step_s = pace(made.evidence) or made.evidence.seconds / steps

    def run(self, steps: int | None = None, **changes: Any) -> Trial:
        """Run a trial of BASE with `changes`. ValueError for an unknown factor."""
        if unknown := sorted(set(changes) - set(BASE)):
            raise ValueError(f"no factor {unknown[0]!r}; there are {', '.join(BASE)}")
        if not self.step_s:
            raise ValueError("nothing is known of a step's time yet; calibrate() first")
        cell = BASE | changes
        steps = steps or self.setup.steps
        # By operation count, in proportion to layers; with masks a tenth of that, which is ample.
        share = cell["layers"] if cell["path"] == "loop" else 0.1 * cell["layers"]
        return self._run(
            cell,
            steps,
            deadline_s=round(self.deadline_s(cell["deadline"]), 2),
            predicted_s=steps * self.step_s * share,
            factor=slowed(cell),
        )

    def deadline_s(self, factor: float = 1.0) -> float:
        """Old deadline in seconds, times `factor`."""
        return factor * self.setup.allowed * self.step_s

    def bisect(self, steps: int) -> Found:
        """Smallest set of factors behind the old rule's HANG, after a screen of all pairs."""

        def judged(cell: dict[str, Any], attempt: int) -> Tried:
            made = self.run(steps, **cell)
            kind = "PASS" if made.finished else "HANG"
            if made.verdict.kind == "INCONCLUSIVE":
                kind = "INCONCLUSIVE"
            return Tried(kind, "old rule" if kind == "HANG" else "", made.id)

        return Bisection(FACTORS, judged, kind="HANG", whole_screen=True).find()

    def _run(self, cell: dict[str, Any], steps: int, **options: Any) -> Trial:
        with self.gpus.one() as gpu:
            spec = self.spec(cell, steps)
            id, evidence, verdict = self.ledger.run(spec, gpu=gpu, on_hang="kill", **options)
        folder = Path(self.ledger.root) / id
        console = (folder / "stdout.txt").read_text(errors="replace")
        counted = folder / "progress-0.bin"
        last = read(counted)[0] if counted.is_file() else evidence.last()
        made = Trial(id, cell, evidence, verdict, console, last, steps)
        with self._lock:
            if all(made.id != known.id for known in self.trials):
                self.trials.append(made)
                self.say(made)
        return made

    def spec(self, cell: dict[str, Any], steps: int) -> Spec:
        changes = {name: cell[name] for name in ("layers", "path")}
        if cell["path"] != "loop":
            changes["defects"] = []
        settings = asdict(self.setup) | {"changes": changes}
        settings |= dict(zip(("first", "every"), cell["prints"], strict=True))
        settings |= {name: cell[name] for name in ("aux_stats", "tracing")}
        settings |= {"lock_at": cell["lock_at"]} if cell["lock_at"] else {}
        del settings["steps"], settings["allowed"]
        observers = tuple(name for name in SLOWS if cell[name])
        env = {"CUDA_LAUNCH_BLOCKING": "1"} if cell["blocking"] else {}
        return Spec(SUBJECT, settings, steps=steps, observers=observers, env=env)


def slowed(cell: dict[str, Any]) -> float:
    """Factor by which its observers should slow a cell."""
    return math.prod((times for name, times in SLOWS.items() if cell[name]), start=1.0)


def pace(evidence: Evidence) -> float | None:
    """Seconds a step, since the first sample of step 1; None if too little was seen.

    The first step includes one-time work, and is left out.
    """
    seen = [(s.t, s.p.step) for s in evidence.of(0) if s.p.step >= 1]
    if not seen or seen[-1][1] == seen[0][1]:
        return None
    (begin, first), last = seen[0], seen[-1][1]
    end = next(t for t, step in seen if step == last)
    return (end - begin) / (last - first)


@dataclass
class Results:
    """Results: trials by name, the bisection, and rows of the measurements.

    planted: the trial with a lock that is never released; it is none of `trials`. state: of
    loop.measure.difference; operations: of the loop, of dense masks, and of those at twice the
    length; memory: of loop.measure.memory; failed: errors of failed measurements; attention: of
    loop.measure.attention, as it was and without its defects.
    """

    lab: Lab
    named: dict[str, Trial]
    bisection: Found
    state: dict[str, Any] | None
    operations: list[dict[str, Any]]
    memory: list[dict[str, Any]]
    failed: list[str] = field(default_factory=list)
    planted: Trial | None = None
    attention: list[dict[str, Any]] = field(default_factory=list)

    @property
    def trials(self) -> list[Trial]:
        """Every trial of the loop that ran, in the order in which they ended."""
        return [trial for trial in self.lab.trials if not trial.cell["lock_at"]]

    @property
    def spread(self) -> float:
        """Largest over smallest time of a step, over trials of the same program."""
        alike = {"path": "loop", "layers": 1} | dict.fromkeys(SLOWS, False)
        paces = [pace(t.evidence) for t in self.trials if t.cell == t.cell | alike]
        paces = [p for p in paces if p]
        return max(paces) / min(paces) if len(paces) > 1 else 1.0


def cells(deadlines: list[float], layers: int) -> dict[str, dict[str, Any]]:
    """Cells that differ from BASE in one thing at a time, by name."""
    found: dict[str, dict[str, Any]] = {f"{d:g} x": {"deadline": float(d)} for d in deadlines}
    found |= {f"{layers} layers": {"layers": layers}}
    found |= {name: {"prints": prints} for name, prints in PRINTS.items()}
    return found | OBSERVERS


def investigate(
    lab: Lab,
    *,
    deadlines: list[float],
    layers: int,
    bisect_steps: int,
    bisect_tokens: int,
    memory: list[dict[str, Any]],
    workers: int,
    folder: str | Path,
    deadline_s: float,
) -> Results:
    """Calibrate, then run everything, `workers` processes at a time.

    memory: settings of loop.measure.memory, one for each cell. With `lab.gpus`, trials run one a
    GPU instead, since trials that share a GPU are not trusted.
    """
    lab.calibrate()
    setup, changes = lab.setup, {"layers": BASE["layers"]}
    settings = {name: getattr(setup, name) for name in ("design", "tokens", "device", "threads")}
    settings["changes"] = changes
    fast = {"changes": {"path": "masked", "defects": [], **changes}}
    measured = {
        "operations": [settings, settings | fast, settings | {"tokens": 2 * setup.tokens} | fast],
        "state": [{"settings": settings, "after": 4}],
        "attention": [settings, settings | {"changes": {"defects": [], **changes}}],
        "memory": memory,
    }
    failed = []

    def rows(name: str) -> list[dict[str, Any]]:
        if not measured[name]:
            return []
        spec = {"measure": name, "settings": measured[name]}
        how = {"deadline_s": deadline_s, "gpus": lab.gpus, "folder": folder, "progress": False}
        [ended] = sweep.measure(ENTRY, [name], lambda name, share_s: spec, **how)
        if ended.status != "ok":
            failed.append(f"{name}: {ended.status}, {ended.message}")
        return ended.result["rows"] if ended.result else []

    def bisected() -> Found:
        if bisect_tokens == setup.tokens:
            return lab.bisect(bisect_steps)
        small = Lab(lab.ledger, replace(setup, tokens=bisect_tokens), lab.say, lab.gpus)
        small.calibrate()
        try:
            return small.bisect(bisect_steps)
        finally:
            lab.trials += small.trials

    named = cells(deadlines, layers)
    longest_first = sorted(named, key=lambda name: -named[name].get("deadline", 1.0))
    jobs = [bisected, *(partial(rows, name) for name in measured), partial(lab.run, **PLANTED)]
    jobs += [partial(lab.run, **named[name]) for name in longest_first]
    # The bisection runs one trial after another; with one more worker no GPU waits for it.
    at_once = len(lab.gpus.names) + 1 if lab.gpus.names else workers
    ended = sweep.each(lambda gpu, job: job(), jobs, workers=at_once)
    found, operations, state, attention, held, planted, *ran = ended
    by_name = dict(zip(longest_first, ran, strict=True))
    in_order = {name: by_name[name] for name in named}
    first = state[0] if state else None
    return Results(lab, in_order, found, first, operations, held, failed, planted, attention)
