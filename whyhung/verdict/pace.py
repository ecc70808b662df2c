"""Estimate a trial's speed, progress and remaining time from samples of its progress."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from whyhung.watch.evidence import Evidence, P, Sample

RECENT_S = 5.0
# Share of a step's time that is over when a phase begins, until more is known.
_BEGUN = {"start": 0.0, "data": 0.0, "other": 0.0, "forward": 0.05, "backward": 0.35,
          "optimizer": 0.95, "end": 1.0}  # fmt: skip


def fraction(p: P, steps: int) -> float:
    """Return the estimated share of `steps` steps done at p, 0 to 1; in a backward by its nodes."""
    if p.step < 0 or steps < 1:
        return 0.0
    share = _BEGUN.get(p.phase, 0.0)
    if p.total and p.phase in ("backward", "other"):
        share = max(share, _BEGUN["backward"])
        share += (_BEGUN["optimizer"] - share) * min(1.0, p.fired / p.total)
    return min(1.0, (p.step + share) / steps)


def moves(samples: Sequence[Sample]) -> int:
    """Return how often P was seen to change."""
    return sum(a.p != b.p for a, b in pairwise(samples))


def backward_eta_s(samples: Sequence[Sample]) -> float | None:
    """Return estimated seconds until the last sample's backward is done; None outside of one.

    Remaining nodes times the mean of two paces: of all nodes that ran, since one heavy node in
    each layer makes the pace fluctuate; and of the latest half of them, since the pace may change
    for good.
    """
    last = samples[-1] if samples else None
    if last is None or not 0 < last.p.fired < last.p.total:
        return None
    mine = [s for s in samples if s.p.step == last.p.step and s.p.fired > 0]
    latest = next((s for s in mine if s.p.fired >= last.p.fired / 2), last)
    since = [s for s in (mine[0], latest) if s.t < last.t and s.p.fired < last.p.fired]
    if not since:
        return None
    node_s = [(last.t - s.t) / (last.p.fired - s.p.fired) for s in since]
    return (last.p.total - last.p.fired) * sum(node_s) / len(node_s)


def pace(evidence: Evidence) -> dict[str, float | None]:
    """Return numbers of a trial that moves, of its slowest rank.

    fraction done; steps_per_s; nodes_per_s of late; estimates eta_s until all its steps are done,
    backward_eta_s until the backward is, projected_s for all steps, start-up left out; ratio of
    that to the prediction. None if unknown.
    """
    steps = int(evidence.spec.get("steps") or 0)
    names = "fraction steps_per_s nodes_per_s eta_s backward_eta_s projected_s ratio"
    found: dict[str, float | None] = dict.fromkeys(names.split())
    rank = min(evidence.ranks(), key=lambda r: evidence.last(r).key(), default=None)
    if rank is None:
        return found
    samples = evidence.of(rank)
    last = samples[-1]
    found["fraction"] = done = fraction(last.p, steps) if steps else None
    found["backward_eta_s"] = backward_eta_s(samples)
    recent = next((s for s in samples if s.t >= last.t - RECENT_S), last)
    if last.t > recent.t and last.p.step == recent.p.step and last.p.fired > recent.p.fired:
        found["nodes_per_s"] = (last.p.fired - recent.p.fired) / (last.t - recent.t)
    # its work begins with the last sample before P moved for the first time
    start = next((a for a, b in pairwise(samples) if a.p != b.p), last)
    worked = last.t - start.t
    if worked <= 0:
        return found
    found["steps_per_s"] = max(0, last.p.step) / worked
    if done:
        found["projected_s"] = worked / done
        found["eta_s"] = max(0.0, found["projected_s"] - worked)
        if evidence.predicted_s:
            found["ratio"] = found["projected_s"] / evidence.predicted_s
    return found
