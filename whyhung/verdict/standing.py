"""Reports that still stood when a run ended, from evidence.reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whyhung.verdict.graph import untimed
from whyhung.watch.evidence import Evidence

BY = "ended by "  # prefix of the message of an End by a signal


def standing(evidence: Evidence) -> dict[str, Any] | None:
    """Return the last report that was not withdrawn; None if there is none."""
    return next((r for r in reversed(evidence.reports) if r["withdrawn"] is None), None)


def cut_short(evidence: Evidence) -> str:
    """Return the signal that ended it while a report stood, "ended by you (SIGINT)"; else ""."""
    end = evidence.end
    by_signal = end is not None and end.message.startswith(BY)
    return end.message if by_signal and standing(evidence) else ""


def remembered(told: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict that a report came from, as far as the report has it."""
    kind, _, what = told["label"].partition(":")
    names = "rank", "rested_s", "where", "left_s"
    numbers = {name: told[name] for name in names if told.get(name) is not None}
    said = {"rule": "as it was told before it was ended", "because": told.get("because", ())}
    return {"kind": kind, "what": what, "line": told["line"], "numbers": numbers, **said}


def without_timers(
    because: Sequence[str], edges: Sequence[dict[str, Any]]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the same without times left: in a wait that can never end a timer only polls again."""
    told = [{**edge, "text": untimed(edge["text"])} for edge in edges]
    return [untimed(one) for one in because], told
