"""Several trials beside each other: all of one spec, or the two arms of a comparison."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from nsa.lab.verdict.rules import Verdict, judge
from nsa.lab.watch.evidence import Evidence

GOOD = ("PASS",)


def compare(trials: Sequence[Evidence | Verdict]) -> Verdict:
    """Trials of one spec as one: what they all are, or FLAKY with k of n and a Jeffreys interval.

    Those that are INCONCLUSIVE do not count. numbers: n, k of the most frequent verdict that is not
    PASS, low and high of its rate at 95 %, and `counts` by label. That all are alike bounds how
    often another would come; it does not say never.

    Raises ValueError for no trial, and for evidence of different specs.
    """
    if not trials:
        raise ValueError("no trials to compare; give all that ran of one spec")
    specs = {json.dumps(t.spec, sort_keys=True) for t in trials if isinstance(t, Evidence)}
    if len(specs) > 1:
        raise ValueError(f"{len(specs)} different specs: what differs may be their doing; use one")
    verdicts = [t if isinstance(t, Verdict) else judge(t) for t in trials]
    told = [v for v in verdicts if v.kind != "INCONCLUSIVE"]
    left = len(verdicts) - len(told)
    notes = [f"{left} of {len(verdicts)} are inconclusive and do not count"] if left else []
    if not told:
        return Verdict("INCONCLUSIVE", verdicts[0].what, "no trial tells anything", notes)
    counts = Counter(v.label for v in told)
    n = len(told)
    bad = Counter(v.label for v in told if v.kind not in GOOD) or counts
    label, k = bad.most_common(1)[0]
    low, high = jeffreys(k, n)
    numbers = {"n": n, "k": k, "of": label, "low": low, "high": high, "counts": dict(counts)}
    if len(counts) == 1:
        alike = next(v for v in told)
        rare = jeffreys(0, n)[1]
        notes = [f"{n} of {n} alike; another verdict comes in less than {rare:.0%} (95 %)", *notes]
        return Verdict(alike.kind, alike.what, alike.rule, [*alike.because, *notes], alike.place,
                       {**alike.numbers, **numbers})  # fmt: skip
    said = [f"{name}: {count} of {n}" for name, count in counts.most_common()]
    rate = f"{label} in {k} of {n}, a rate of {low:.0%} to {high:.0%} (95 %, Jeffreys)"
    return Verdict("FLAKY", label, "one spec, different verdicts", [rate, *said, *notes],
                   numbers=numbers)  # fmt: skip


def arms(a: Evidence, b: Evidence) -> Verdict:
    """Whether two arms of a comparison compared anything: INVALID where both ran the same path.

    PASS where their witnesses differ, however often each path ran; INCONCLUSIVE without both.
    """
    paths = [_paths(arm.witness) for arm in (a, b)]
    if None in paths:
        who = " and ".join(name for name, p in zip("ab", paths, strict=True) if p is None)
        why = f"no path witness of arm {who}: nothing tells what ran"
        return Verdict("INCONCLUSIVE", "no-witness", "arms without a witness", [why])
    if paths[0] == paths[1]:
        why = f"both arms ran {', '.join(sorted(paths[0])) or 'nothing'}"
        return Verdict("INVALID", "same-path", "both arms ran the same path", [why])
    only = [", ".join(sorted(paths[i] - paths[1 - i])) or "nothing else" for i in (0, 1)]
    why = [f"only the first ran {only[0]}", f"only the second ran {only[1]}"]
    return Verdict("PASS", "", "the arms ran different paths", why)


def jeffreys(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The interval for a rate of which k of n were seen; from 0 where k = 0, to 1 where k = n."""
    if not 0 <= k <= n or n < 1:
        raise ValueError(f"k={k} of n={n}: k must be 0 to n, and n at least 1")
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = 0.0 if k == 0 else float(betaincinv(k + 0.5, n - k + 0.5, tail))
    high = 1.0 if k == n else float(betaincinv(k + 0.5, n - k + 0.5, 1 - tail))
    return low, high


def _paths(witness: dict[str, Any] | None) -> set[str] | None:
    """What ran, without how often: `branch: implementation`, and whatever else is one word."""
    if not witness or witness.get("paths") == {}:
        return None
    words = {
        f"{name}: {value}"
        for name, value in witness.items()
        if isinstance(value, str | bool | int | float)
    }
    paths = witness.get("paths", {})
    return words | {f"{branch}: {name}" for branch, ran in paths.items() for name in ran}
