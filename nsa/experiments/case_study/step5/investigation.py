"""All trials of the step-5 question, run as far side by side as the machine allows."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.experiments.case_study.step5.trials import BASE, Lab, Trial
from nsa.lab.process import trial
from nsa.lab.process.gpus import only
from nsa.lab.search.candidates import Found

SEVERAL = "nsa.experiments.case_study.loop.measure:several"
STATE = "nsa.experiments.case_study.loop.measure:difference"
PRINTS = {"no debug lines": (0, 20), "2 and every 3rd": (2, 3), "every step": (5, 1)}
OBSERVERS = {
    "aux stats": {"aux_stats": True},
    "tracing": {"tracing": True},
    "launch blocking": {"blocking": True},
}


@dataclass
class Results:
    """What was found: trials by name, the bisection, and rows of the measurements.

    state: of loop.measure.difference; operations, memory: of loop.measure; failed: what a
    measurement ended with instead.
    """

    lab: Lab
    named: dict[str, Trial]
    bisection: Found
    state: dict[str, Any] | None
    operations: list[dict[str, Any]]
    memory: list[dict[str, Any]]
    failed: list[str] = field(default_factory=list)

    @property
    def trials(self) -> list[Trial]:
        """Every trial that ran, in the order in which they ended."""
        return self.lab.trials

    def ids(self, *names: str) -> str:
        """Ids of trials by name, for a sentence."""
        return ", ".join(self.named[name].id for name in names if name in self.named)


def cells(deadlines: list[float], layers: int) -> dict[str, dict[str, Any]]:
    """What is varied, one thing at a time, by name."""
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
    bisect_tokens: int | None = None,
    memory: list[dict[str, Any]],
    workers: int = 1,
    folder: str | Path | None = None,
    deadline_s: float = 300.0,
) -> Results:
    """Calibrates, then runs all of it, `workers` processes at a time.

    memory: settings of loop.measure.memory, one for each cell. Where there are `lab.gpus`, as
    many as those: trials that share a GPU are not trusted.
    """
    lab.calibrate()
    named = cells(deadlines, layers)
    setup, failed = lab.setup, []
    changes = {"layers": BASE["layers"]}
    settings = {"design": setup.design, "tokens": setup.tokens, "device": setup.device,
                "threads": setup.threads, "changes": changes}  # fmt: skip
    fast = {"changes": {"path": "masked", "defects": [], **changes}}
    counted = [settings, settings | fast, settings | {"tokens": 2 * setup.tokens} | fast]

    def measured(name: str, entry: str, spec: dict[str, Any]) -> dict[str, Any] | None:
        place = None if folder is None else Path(folder) / name
        with lab.gpus.one() as gpu:
            outcome = trial.run_child(
                entry, spec, deadline_s=deadline_s, folder=place, env=only(gpu)
            )
        if outcome.status != "ok":
            failed.append(f"{name}: {outcome.status}, {outcome.message}")
        return outcome.result

    def rows(name: str, each: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = measured(name, SEVERAL, {"measure": name, "settings": each}) if each else None
        return found["rows"] if found else []

    def bisected() -> Found:
        small = lab.with_tokens(bisect_tokens or setup.tokens)
        try:
            return small.bisect(bisect_steps)
        finally:
            if small is not lab:
                lab.trials += small.trials

    # The bisection is one trial after another, so one worker more: a GPU waits for none of it.
    at_once = len(lab.gpus.names) + 1 if lab.gpus.names else max(1, workers)
    longest_first = sorted(named, key=lambda name: -named[name].get("deadline", 1.0))
    with ThreadPoolExecutor(at_once) as pool:
        found = pool.submit(bisected)
        operations = pool.submit(rows, "operations", counted)
        state = pool.submit(measured, "state", STATE, {"settings": settings, "after": 4})
        held = pool.submit(rows, "memory", memory)
        ran: dict[str, Future] = {n: pool.submit(lab.run, **named[n]) for n in longest_first}
    return Results(
        lab,
        {name: ran[name].result() for name in named},
        found.result(),
        state.result(),
        operations.result(),
        held.result(),
        failed,
    )
