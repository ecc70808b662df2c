"""Small trials that settle what the case study left open, each in a child process of its own."""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.experiments.case_study.settlement.probes import TRIALS
from nsa.lab.process.trial import run_child

ENTRY = "nsa.experiments.case_study.settlement.trials:run"


@dataclass(frozen=True)
class Ended:
    """How one trial ended; `found` is None unless it ended well."""

    name: str
    outcome: str
    message: str
    seconds: float
    found: dict[str, Any] | None


def run_all(
    names: Sequence[str] = ("all",),
    *,
    workers: int = 2,
    deadline_s: float = 60.0,
    folder: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Ended]:
    """{name: how it ended} of those trials, `workers` at once; ValueError for an unknown name."""
    chosen = tuple(TRIALS) if tuple(names) == ("all",) else tuple(names)
    if unknown := [name for name in chosen if name not in TRIALS]:
        raise ValueError(f"no trial {unknown[0]!r}; there are {', '.join(TRIALS)}")

    def one(name: str) -> Ended:
        kept = None if folder is None else Path(folder, name)
        ended = run_child(ENTRY, {"name": name}, deadline_s=deadline_s, folder=kept)
        if progress:
            said = f"{ended.status}, {ended.seconds:.1f} s"
            print(f"{name}: {said} {ended.message}", file=sys.stderr, flush=True)
        return Ended(name, ended.status, ended.message, ended.seconds, ended.result)

    with ThreadPoolExecutor(workers) as pool:
        return {ended.name: ended for ended in pool.map(one, chosen)}


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """The inside of the child: the trial that spec["name"] names."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return TRIALS[spec["name"]]()
