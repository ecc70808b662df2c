"""Execution of a plan's trials into a ledger: each once, within the time budget.

A sweep runs all trials; a bisection runs those that determine which factors, or which value of one,
cause a fault.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from threading import Event, Lock, Timer
from typing import Any

from whyhung.process.gpus import Gpus
from whyhung.process.runner import Spec
from whyhung.process.trial import Stopped
from whyhung.verdict import Verdict
from whyhung.watch.evidence import Evidence
from workbook.lab.search import calibration
from workbook.lab.search.bisection import Bisection
from workbook.lab.search.candidates import Cell, Found, Row, Spent, Tried, ordered
from workbook.lab.search.ledger import FULL, Ledger
from workbook.lab.search.plan import Plan
from workbook.lab.search.repeats import compare, compare_paths
from workbook.lab.sweep import each

# Factors that choose code: trials that differ in one must run different code.
PATHS = (
    "branch", "backend", "compressed_backend", "selected_backend", "window_backend", "safe_packing",
)  # fmt: skip


@dataclass(frozen=True)
class Done:
    """A finished trial: its cell, id, verdict and evidence; cached: from an earlier run.

    calibrated: its calibration's prediction as text, "" if there was none.
    """

    cell: Cell
    id: str
    verdict: Verdict
    evidence: Evidence
    cached: bool = False
    calibrated: str = ""


@dataclass
class Trials:
    """Runs cells of a plan into a ledger, until the budget of seconds is spent.

    The trial in flight when time is up, or when `stop` is set, is ended: raises Spent, unless it
    was certified to hang. A full disk also raises Spent. ValueError if trials cannot be stored at
    all.
    """

    plan: Plan
    ledger: Ledger
    budget_s: float | None = None
    say: Callable[[Done], None] = lambda done: None
    tell: Callable[[dict[str, Any]], Any] = lambda report: None  # called on stalls, see runner.run
    again: bool = False  # stored trials are rerun; calibrations are not

    def __post_init__(self) -> None:
        budget_s = self.budget_s
        if budget_s is not None and not budget_s > 0:
            raise ValueError(f"budget_s={budget_s} must be greater than 0 seconds")
        self.stop, self._lock, self._spent = Event(), Lock(), "stopped by the caller"
        if budget_s is not None:
            told = f"{budget_s:g} s" if budget_s < 120 else f"{budget_s / 60:g} min"
            self._spent = f"the budget of {told} is spent"
            timer = Timer(budget_s, self.stop.set)
            timer.daemon = True
            timer.start()

    def run(self, cell: Cell, attempt: int = 0, gpu: str | None = None) -> Done:
        """Return a cell's trial from the ledger, or run it; `gpu` as in runner.run. Raises Spent.

        Thread-safe: several threads may each run a trial.
        """
        spec, options = self.plan.spec(cell, attempt), self.plan.options(cell)
        told = self._calibrate(cell, options, gpu) if self.plan.calibrate else ""
        id, evidence, verdict, cached = self.found_or_run(spec, options, gpu, self.again)
        done = Done(dict(cell), id, verdict, evidence, cached, told)
        with self._lock:
            self.say(done)
        return done

    def _calibrate(self, cell: Cell, options: dict[str, Any], gpu: str | None) -> str:
        """Set a cell's times in `options`; return a description with the trial's id."""
        spec = calibration.calibration_spec(self.plan, cell)
        limit = {"deadline_s": calibration.DEADLINE_S}
        limit |= {name: options[name] for name in ("on_hang", "on_stall")}
        id, evidence, verdict, _ = self.found_or_run(spec, limit, gpu)
        found = calibration.Calibration.of(evidence) if verdict.kind == "PASS" else None
        if found is None:
            return f"nothing was predicted: its calibration {id} ended as {verdict.label}"
        size = calibration.size_of(self.plan, cell)
        options["predicted_s"] = found.predicted_s(size, self.plan.steps)
        # Two digits: values that differ only by noise must not give the trial another id.
        options["stall_s"] = max(options["stall_s"], float(f"{found.stall_s(size):.2g}"))
        return (
            f"predicted {options['predicted_s']:.3g} s, a silence of {options['stall_s']:.3g} s "
            f"allowed: by calibration {id}"
        )

    def found_or_run(
        self, spec: Spec, options: dict[str, Any], gpu: str | None = None, again: bool = False
    ) -> tuple[str, Evidence, Verdict, bool]:
        """Return a trial: its id, evidence, verdict, and if the ledger had it. Raises Spent."""
        id = self.ledger.id(spec, **options)
        if not again and (found := self.ledger.settled(id)):
            return id, *found, True
        if self.stop.is_set():
            raise Spent(self._spent)
        try:
            id, evidence, verdict = self.ledger.run(
                spec, again=again, **options, gpu=gpu, stop=self.stop, tell=self.tell
            )
        except (Stopped, InterruptedError):
            raise Spent(self._spent) from None
        except OSError as error:
            if error.errno in FULL:
                raise Spent(error.strerror) from None
            raise ValueError(
                f"cannot keep trials in {self.ledger.root} ({error.strerror}); name another folder"
            ) from None
        cut = evidence.end is None or evidence.end.type == "caller"
        if self.stop.is_set() and cut and verdict.kind == "INCONCLUSIVE":
            raise Spent(self._spent)
        return id, evidence, verdict, False


@dataclass
class Swept:
    """Result of a sweep: its trials, the cells that did not run, and why.

    flaky: {number of the first attempt: Verdict} of cells whose attempts differ; invalid: pairs of
    trials that should have run different code but did not.
    """

    done: list[Done] = field(default_factory=list)
    not_run: list[Cell] = field(default_factory=list)
    why: str = ""
    flaky: dict[int, Verdict] = field(default_factory=dict)
    invalid: list[tuple[Done, Done]] = field(default_factory=list)


def sweep(plan: Plan, ledger: Ledger, *, gpus: Gpus | None = None, **options: Any) -> Swept:
    """Run every cell of the plan that is not in the ledger; `options` as in Trials.

    One trial on each of `gpus` at once, unless a trial of the plan has several ranks; else
    sequentially. An interrupted sweep resumes: finished trials are in the ledger.
    """
    trials, cells = Trials(plan, ledger, **options), list(plan.cells())
    swept = Swept()

    def attempts(gpu: str | None, cell: Cell) -> list[Done]:
        found: list[Done] = []
        try:
            while len(found) < plan.attempts and not swept.why:
                found.append(trials.run(cell, len(found), gpu))
        except Spent as spent:
            swept.why = str(spent)
        return found

    if gpus and (len(gpus.names) == 1 or any(plan.spec(cell).ranks > 1 for cell in cells)):
        gpus = None
    rows = each(attempts, cells, gpus=gpus, stop=trials.stop)
    for cell, found in zip(cells, rows, strict=True):
        if len(found) < plan.attempts:
            swept.not_run.append(cell)
        elif plan.attempts > 1:
            together = compare([done.verdict for done in found])
            if together.kind == "FLAKY":
                swept.flaky[len(swept.done)] = together
        swept.done += found
    swept.invalid = list(same_paths(swept.done))
    return swept


def same_paths(done: Sequence[Done]) -> Iterator[tuple[Done, Done]]:
    """Yield pairs that differ only in one factor that chooses code, but ran the same code."""
    for one, other in combinations(done, 2):
        differ = [name for name in one.cell if one.cell[name] != other.cell[name]]
        comparable = len(differ) == 1 and differ[0] in PATHS and one.evidence.witness
        if comparable and compare_paths(one.evidence, other.evidence).kind == "INVALID":
            yield one, other


def bisect(
    plan: Plan, ledger: Ledger, *, say: Callable[[Row], None] = lambda row: None, **options: Any
) -> Found:
    """Search for the cause of the plan's fault, in at most `plan.most` trials and the budget.

    With `attempts` above 1, a plan of one factor with ordered values is searched for a flaky
    threshold. `options` as in Trials. ValueError for a plan in which nothing is varied.
    """
    trials = Trials(plan, ledger, **options)
    varied = {name: values for name, values in plan.values.items() if len(values) > 1}
    if not varied:
        out = f"; left out: {'; '.join(plan.left_out)}" if plan.left_out else ""
        raise ValueError(f"no factor has two values that can be run{out}")
    fixed = {name: value for name, value in plan.base.items() if name not in varied}

    def run(cell: Cell, attempt: int) -> Tried:
        done = trials.run(fixed | cell, attempt)
        return Tried(done.verdict.kind, done.verdict.signature, done.id, done.verdict.what)

    search = Bisection(
        varied,
        run,
        legal=lambda part: plan.legal(fixed | part),
        kind=plan.kind,
        most=plan.most,
        attempts=plan.attempts,
        seen={name: value for name, value in plan.seen.items() if name in varied},
        say=say,
    )
    flaky = plan.attempts > 1 and len(varied) == 1 and ordered(*varied.values())
    return search.find_flaky() if flaky else search.find()
