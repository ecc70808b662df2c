"""Lessons of `nsa.experiments.correctness.lessons`, each learnt in a child process, as rows."""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nsa.experiments.correctness.learning import SOLVED
from nsa.experiments.correctness.lessons import lesson
from nsa.lab.process.trial import run_child

ENTRY = "nsa.experiments.correctness.learning:learn"


def learn_all(
    names: Sequence[str],
    tokens: int,
    *,
    deadline_s: float,
    workers: int = 1,
    threads: int | None = None,
    folder: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> list[dict]:
    """One row a lesson: `lesson`, `outcome`, `message`, `seconds` and what `learning.learn` found.

    `workers` lessons at once; times are not taken. `options` are those of `lessons.lesson`.
    Training ends early enough to be asked within `deadline_s`. ValueError for an unknown lesson
    before any is learnt.
    """
    specs = {name: lesson(name, tokens, **options) for name in names}

    def one(name: str) -> dict:
        ended = run_child(
            ENTRY,
            specs[name] | {"threads": threads, "budget_s": 0.7 * deadline_s},
            deadline_s=deadline_s,
            folder=None if folder is None else Path(folder, name),
        )
        row = {"lesson": name, "outcome": ended.status, "message": ended.message}
        row |= (ended.result or {}) | {"seconds": ended.seconds}
        if progress:
            said = ended.message or f"as expected: {row['as_expected']}"
            print(f"{name}, T {tokens}: {ended.status}, {ended.seconds:.1f} s, {said}",
                  file=sys.stderr, flush=True)  # fmt: skip
        return row

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, specs))  # a name that stands twice is learnt once


def answers(rows: Sequence[dict]) -> list[dict]:
    """A line a question: lesson, question, accuracy, by chance, wanted, steps, peek."""
    found = []
    for row in rows:
        for name, accuracy in row.get("accuracy", {}).items():
            learnable = row["expected"][name]
            found.append({
                "lesson": row["lesson"], "question": name, "accuracy": accuracy,
                "by chance": row["chance"][name],
                "wanted": f"at least {SOLVED}" if learnable else "about chance: out of reach",
                "steps": row["steps"], "peek": row["peek"],
            })  # fmt: skip
    return found
