"""Lessons of `nsa.experiments.correctness.lessons`, each learnt in a child process, as rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.experiments.correctness.learning import SOLVED
from nsa.experiments.correctness.lessons import lesson
from nsa.lab import sweep
from nsa.lab.process.trial import Outcome

WANTED = {True: f"at least {SOLVED}", False: "about chance: out of reach"}
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
    """One row a lesson: `lesson`, and what `row_of` says; a lesson named twice is learnt once.

    `workers` lessons at once; times are not taken. `options` are those of `lessons.lesson`.
    ValueError for an unknown lesson before any is learnt.
    """
    specs = {name: lesson(name, tokens, **options) for name in names}
    ended = sweep.measure(
        ENTRY,
        list(specs),
        lambda name, s: specs[name] | limits(threads, s),
        deadline_s=deadline_s,
        workers=workers,
        folder=folder,
        name=lambda name: f"{name}, T {tokens}",
        said=said,
        progress=progress,
    )
    return [{"lesson": name} | row_of(how) for name, how in zip(specs, ended, strict=True)]


def limits(threads: int | None, deadline_s: float) -> dict[str, Any]:
    """What a lesson's spec says of its process: training ends early enough to be asked in time."""
    return {"threads": threads, "budget_s": 0.7 * deadline_s}


def said(result: dict) -> str:
    """What a line of progress tells of a lesson."""
    return f"as expected: {result['as_expected']}"


def row_of(ended: Outcome) -> dict:
    """`outcome`, `message`, the fields of `learning.Learnt` where it ended well, and `seconds`."""
    row = {"outcome": ended.status, "message": ended.message, **(ended.result or {})}
    return row | {"seconds": ended.seconds}


def answers(rows: Sequence[dict]) -> list[dict]:
    """A line a question: lesson, question, accuracy, by chance, wanted, steps, peek."""
    return [
        {
            "lesson": row["lesson"],
            "question": name,
            "accuracy": accuracy,
            "by chance": row["chance"][name],
            "wanted": WANTED[row["expected"][name]],
            "steps": row["steps"],
            "peek": row["peek"],
        }
        for row in rows
        for name, accuracy in row.get("accuracy", {}).items()
    ]
