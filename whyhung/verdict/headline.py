"""Verdict in one sentence of plain words, with the user's line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whyhung.verdict.picture import NOBODY, TIMED, WIDTH, clipped, picture, seconds
from whyhung.verdict.rests import cut_short
from whyhung.verdict.rules import Verdict
from whyhung.watch.evidence import Evidence

# Wording for a job that was only looked at: its activity, rather than its lateness.
IDLES = {"INCONCLUSIVE:running": "it moves", "INCONCLUSIVE:idle": "it is idle"}
ATTACHED = {"HANG": "HANG, it can never go on", "STALLED": "it waits", "SLOW": "it works"}


def headline(evidence: Evidence, verdict: Verdict) -> str:
    """Return the verdict in plain words, with the user's line if there is one."""
    kind, numbers = verdict.kind, verdict.numbers
    said = _waits(verdict.edges) or next(iter(verdict.because), "") or verdict.rule
    if "attached" in evidence.spec and kind in ATTACHED:
        kind = "it waits" if verdict.what == "timer" else ATTACHED[kind]
    elif verdict.label in IDLES:
        kind = IDLES[verdict.label]
    elif kind == "STALLED" or verdict.label == "SLOW:uncounted":
        rested = numbers.get("rested_s")
        if rested is None:
            rested = max(map(evidence.frozen_s, evidence.ranks()), default=0.0)
        kind += f" for {seconds(rested)}" if rested else ""
        kind += ", not counted" if verdict.kind == "SLOW" else ""
    said = clipped(said, 3 * WIDTH)
    at = said.find(verdict.line) if verdict.line in said else len(said)
    if verdict.line and at > WIDTH:
        said = f"at {verdict.line}: {said}"  # first in any case
    elif verdict.line and verdict.line not in said:
        who = numbers.get("where", "")
        named = who and verdict.edges and not said.startswith(who)
        said += f"; {who} is at " if named else ", at "
        said += verdict.line
    if ended := cut_short(evidence):
        kind = f"{ended} while: {kind}"
    return f"{kind}: {said}" if said else kind


def _waits(edges: Sequence[dict[str, Any]]) -> str:
    """Return a sentence: who waits first, where, for whom, and what that does; "" for no edges."""
    nodes, _ = picture(edges)
    if not nodes:
        return ""
    first, found = nodes[0], {node.name: node for node in nodes}
    told, waits = "each of " * first.many + first.name, first.waits[0]
    if not first.at:
        told += f" {waits}"
    elif "," in waits or ": " in waits:
        told += f", at {first.at}, {waits}"
    else:
        told += f" {waits} at {first.at}"
    if first.name in first.to and "itself" not in waits:
        told += f" ({first.itself()})"
    others = [found[to] for to in first.to if to != first.name]
    other = next((node for node in others if node.waits), others[0] if others else None)
    if other is None or other.outer:
        known = other is None or other.name == NOBODY or TIMED.search(waits)
        return told if known else f"{told} ({_brief(other.name)})"
    named = first.kind != "collective" or any(node.name in waits for node in others)
    if not named:
        told += f" for {', '.join(node.name for node in others[:3])}" + " ..." * bool(others[3:])
    timed = TIMED.search("".join(other.waits))
    ends = [_brief(to) for to in other.to if found[to].outer and to != NOBODY]
    does = ", ".join([*other.waits[:1], *(() if timed else ends)])
    if not (other.at or does):
        return told
    who = f"; {other.name}" if named or others[1:] else ", which"
    return f"{told}{who} is in {other.at} ({does})" if other.at else f"{told}{who} {does}"


def _brief(end: str) -> str:
    return end.removeprefix("a timer: ")
