"""Reports that still stood when a run ended, from evidence.reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whyhung.verdict.graph import untimed
from whyhung.watch.evidence import Evidence

BY = "ended by "  # how the message of an End begins that a signal brought


def standing(evidence: Evidence) -> dict[str, Any] | None:
    """The last report that was not withdrawn; None where there is none."""
    return next((r for r in reversed(evidence.reports) if r["withdrawn"] is None), None)


def cut_short(evidence: Evidence) -> str:
    """The signal that ended it while a report stood, "ended by you (SIGINT)"; else ""."""
    end = evidence.end
    by_signal = end is not None and end.message.startswith(BY)
    return end.message if by_signal and standing(evidence) else ""


def remembered(told: dict[str, Any]) -> dict[str, Any]:
    """The verdict that a report came from, as far as the report tells it."""
    kind, _, what = told["label"].partition(":")
    names = "rank", "rested_s", "where", "left_s"
    numbers = {name: told[name] for name in names if told.get(name) is not None}
    said = {"rule": "as it was told before it was ended", "because": told.get("because", ())}
    return {"kind": kind, "what": what, "line": told["line"], "numbers": numbers, **said}


def without_timers(
    because: Sequence[str], edges: Sequence[dict[str, Any]]
) -> tuple[list[str], list[dict[str, Any]]]:
    """The same words without how long a timer runs: in what can never end it only asks again."""
    told = [{**edge, "text": untimed(edge["text"])} for edge in edges]
    return [untimed(one) for one in because], told
