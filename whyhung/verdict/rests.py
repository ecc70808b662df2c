"""Ranks whose progress rests, since when, and the description of one that stands still; and the
reports of that in evidence.reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from whyhung.watch.evidence import OUTSIDE, Evidence, P, Sample, at_last_p

WAIT_S = 17.0  # how long all must be quiet before a wait is reported as a stall
BY = "ended by "  # prefix of the message of an End by a signal
OWN_GAPS = 2.0  # or so many times the longest rest of the run so far, if that is longer
GONE_S = 2.0


@dataclass(frozen=True)
class Rest:
    """One rank since the last change of its progress."""

    rank: int
    p: P
    since: float
    seconds: float
    longest: float  # longest rest before, its first step left out
    gone: bool
    samples: list[Sample]
    wait_s: float | None = None  # how long all must be quiet; None: see bound_s
    over: bool = False  # the run has ended: nothing can come late any more


@dataclass
class Stall:
    """Rank that stands still, and why, as of the last look."""

    state: str  # "busy", "waiting" or "certified"
    what: str
    rest: Rest
    because: list[str]
    line: str = ""
    left_s: float | None = None
    edges: list[dict[str, Any]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    where: str = ""  # process: "rank 0", "process 12 (sleep 15) of rank 0"
    pid: int = 0


def rests(evidence: Evidence) -> list[Rest]:
    """Return one Rest for each rank that was sampled, as of its last sample alive."""
    latest = max((s.t for s in evidence.samples if s.state), default=0.0)
    found = []
    for rank in evidence.ranks():
        samples = evidence.of(rank)
        samples = [s for s in samples if s.state] or samples  # samples of the dead have none
        last, mine = samples[-1], at_last_p(samples)
        before = samples[: -len(mine)]
        times = [[s.t for s in same] for p, same in groupby(before, lambda s: s.p) if _counts(p)]
        longest = max((t[-1] - t[0] for t in times), default=0.0)
        gone = last.state == "Z" or last.t < latest - GONE_S
        seconds, wait_s = last.t - mine[0].t, evidence.wait_s
        over = evidence.end is not None
        found.append(Rest(rank, last.p, mine[0].t, seconds, longest, gone, mine, wait_s, over))
    return found


def _counts(p: P) -> bool:
    """Return True if a rest at p is typical of this run: a first step may take far longer."""
    return p.step >= 1 or p.phase == OUTSIDE


def bound_s(rest: Rest, least_s: float = 0.0) -> float:
    """Return the seconds, at least least_s, of quiet after which this wait counts as a stall."""
    if rest.wait_s is not None:
        return rest.wait_s
    return max(WAIT_S, OWN_GAPS * rest.longest, least_s)


def standing(evidence: Evidence) -> dict[str, Any] | None:
    """Return the last report that was not withdrawn; None if there is none."""
    return next((r for r in reversed(evidence.reports) if r["withdrawn"] is None), None)


def cut_short(evidence: Evidence) -> str:
    """Return the signal that ended it while a report stood, "ended by you (SIGINT)"; else ""."""
    end = evidence.end
    by_signal = end is not None and end.message.startswith(BY)
    return end.message if by_signal and standing(evidence) else ""
