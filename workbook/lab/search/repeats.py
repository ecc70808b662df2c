"""Several trials of one spec as one verdict, and the paths of two variants of a comparison."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from whyhung.verdict import Verdict, judge
from whyhung.watch.evidence import Evidence


def compare(trials: Sequence[Evidence | Verdict]) -> Verdict:
    """Combine trials of one spec: a common verdict, or FLAKY with k of n and a Jeffreys interval.

    INCONCLUSIVE trials do not count. numbers: n, k of the most frequent verdict that is not PASS,
    low and high of its rate at 95 %, and `counts` by label. If all are alike, that bounds the rate
    of another verdict, but does not exclude it.

    Raises ValueError for no trial, and for evidence of different specs.
    """
    if not trials:
        raise ValueError("no trials to compare; give all that ran of one spec")
    specs = {json.dumps(t.spec, sort_keys=True) for t in trials if isinstance(t, Evidence)}
    if len(specs) > 1:
        raise ValueError(f"{len(specs)} different specs: what differs may be their doing; use one")
    verdicts = [t if isinstance(t, Verdict) else judge(t) for t in trials]
    told = [v for v in verdicts if v.kind != "INCONCLUSIVE"]
    n, left = len(told), len(verdicts) - len(told)
    notes = [f"{left} of {len(verdicts)} are inconclusive and do not count"] if left else []
    if not told:
        return Verdict("INCONCLUSIVE", verdicts[0].what, "no trial tells anything", notes)
    counts = Counter(v.label for v in told)
    bad = Counter(v.label for v in told if v.kind != "PASS") or counts
    label, k = bad.most_common(1)[0]
    low, high = jeffreys(k, n)
    numbers = {"n": n, "k": k, "of": label, "low": low, "high": high, "counts": dict(counts)}
    if len(counts) == 1:
        alike, rare = told[0], jeffreys(0, n)[1]
        notes = [f"{n} of {n} alike; another verdict comes in less than {rare:.0%} (95 %)", *notes]
        return Verdict(alike.kind, alike.what, alike.rule, [*alike.because, *notes], alike.place,
                       {**alike.numbers, **numbers})  # fmt: skip
    said = [f"{name}: {count} of {n}" for name, count in counts.most_common()]
    because = [f"{label} in {k} of {n}, a rate of {low:.0%} to {high:.0%} (95 %, Jeffreys)", *said]
    because += notes
    return Verdict("FLAKY", label, "one spec, different verdicts", because, numbers=numbers)


def compare_paths(a: Evidence, b: Evidence) -> Verdict:
    """Check that two variants of a comparison differ: INVALID if both ran the same path.

    PASS if their witnesses differ, however often each path ran; INCONCLUSIVE without both.
    """
    paths = [_paths(variant.witness) for variant in (a, b)]
    if None in paths:
        who = " and ".join(name for name, p in zip("ab", paths, strict=True) if p is None)
        why = f"no path witness of variant {who}: what it ran is unknown"
        return Verdict("INCONCLUSIVE", "no-witness", "variants without a witness", [why])
    if paths[0] == paths[1]:
        why = f"both variants ran {', '.join(sorted(paths[0])) or 'nothing'}"
        return Verdict("INVALID", "same-path", "both variants ran the same path", [why])
    only = [", ".join(sorted(paths[i] - paths[1 - i])) or "nothing else" for i in (0, 1)]
    why = [f"only the first ran {only[0]}", f"only the second ran {only[1]}"]
    return Verdict("PASS", "", "the variants ran different paths", why)


def _paths(witness: dict[str, Any] | None) -> set[str] | None:
    """Return what ran, without counts: `branch: implementation`, and all other scalar entries."""
    if not witness or witness.get("paths") == {}:
        return None
    words = {f"{k}: {v}" for k, v in witness.items() if isinstance(v, str | bool | int | float)}
    paths = witness.get("paths", {})
    return words | {f"{branch}: {name}" for branch, ran in paths.items() for name in ran}


def jeffreys(k: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval for a rate from k of n seen; from 0 if k = 0, to 1 if k = n."""
    if not 0 <= k <= n or n < 1:
        raise ValueError(f"k={k} of n={n}: k must be 0 to n, and n at least 1")
    from scipy.special import betaincinv

    tail = (1 - 0.95) / 2
    low = 0.0 if k == 0 else float(betaincinv(k + 0.5, n - k + 0.5, tail))
    high = 1.0 if k == n else float(betaincinv(k + 0.5, n - k + 0.5, 1 - tail))
    return low, high
