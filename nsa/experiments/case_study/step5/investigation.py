"""All trials of the step-5 question, run as far side by side as the machine allows."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from nsa.experiments.case_study.step5.trials import BASE, Lab, Trial
from nsa.lab import sweep
from nsa.lab.search.candidates import Found

MEASURE = "nsa.experiments.case_study.loop.measure:several"
PRINTS = {"no debug lines": (0, 20), "2 and every 3rd": (2, 3), "every step": (5, 1)}
OBSERVERS = {
    "aux stats": {"aux_stats": True},
    "tracing": {"tracing": True},
    "launch blocking": {"blocking": True},
}


@dataclass
class Results:
    """What was found: trials by name, the bisection, and rows of the measurements.

    state: of loop.measure.difference; operations: of the loop, of dense masks, and of those at
    twice the length; memory: of loop.measure.memory; failed: what a measurement ended with instead.
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
    bisect_tokens: int,
    memory: list[dict[str, Any]],
    workers: int,
    folder: str | Path,
    deadline_s: float,
) -> Results:
    """Calibrates, then runs all of it, `workers` processes at a time.

    memory: settings of loop.measure.memory, one for each cell. Where there are `lab.gpus`, as
    many as those: trials that share a GPU are not trusted.
    """
    lab.calibrate()
    setup, changes = lab.setup, {"layers": BASE["layers"]}
    settings = {name: getattr(setup, name) for name in ("design", "tokens", "device", "threads")}
    settings["changes"] = changes
    fast = {"changes": {"path": "masked", "defects": [], **changes}}
    measured = {
        "operations": [settings, settings | fast, settings | {"tokens": 2 * setup.tokens} | fast],
        "state": [{"settings": settings, "after": 4}],
        "memory": memory,
    }
    failed = []

    def rows(name: str) -> list[dict[str, Any]]:
        if not measured[name]:
            return []
        [ended] = sweep.measure(
            MEASURE, [name], lambda name, _: {"measure": name, "settings": measured[name]},
            deadline_s=deadline_s, gpus=lab.gpus, folder=folder, progress=False,
        )  # fmt: skip
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
    jobs = [bisected, *(partial(rows, name) for name in measured)]
    jobs += [partial(lab.run, **named[name]) for name in longest_first]
    # The bisection is one trial after another, so one worker more: a GPU waits for none of it.
    at_once = len(lab.gpus.names) + 1 if lab.gpus.names else workers
    found, operations, state, held, *ran = sweep.each(lambda gpu, job: job(), jobs, workers=at_once)
    by_name = dict(zip(longest_first, ran, strict=True))
    return Results(
        lab, {name: by_name[name] for name in named}, found, state[0] if state else None,
        operations, held, failed,
    )  # fmt: skip
