"""Verdicts on the plan's expectations, each by its rule, from the trials alone."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from scipy.stats import f as fisher

from workbook.lab.search.candidates import word
from workbook.lab.search.execute import same_paths
from workbook.lab.search.repeats import compare_paths
from workbook.rooms.ab.plan import Variant
from workbook.rooms.ab.rules import COUNTED, TIMED, UNITS, VARIANT, Rule
from workbook.rooms.ab.trials import Results, Trial
from workbook.runs.claim import Claim, Undecided, verdict_of
from workbook.runs.keep import without_paths
from workbook.runs.scaling import Ratio, fit_exponent, fit_line, paired_ratio

LATE = 0.1  # fraction of the losses that count as "the last"
ALPHA = 0.05
EXACT = ("allocated", "growing", *COUNTED)  # the same in every repeat, so one repeat has no spread


@dataclass(frozen=True)
class Judged:
    """An expectation, what was found, and its verdict: "" if nothing was predicted."""

    says: str
    found: str
    verdict: str
    evidence: dict[str, Any]

    @property
    def claim(self) -> Claim:
        return Claim(f"{self.says}: {self.found}", self.verdict, self.evidence)


def judge(results: Results) -> list[Judged]:
    """Judge every expectation, and check that variants naming different code ran different code."""
    found = [_judged(rule, results) for rule in results.plan.rules]
    if all(rule.name != "different_programs" for rule in results.plan.rules):
        found += _named_code(results)
    return found


def tally(judged: Sequence[Judged]) -> str:
    """Sentence that counts the predictions that hold, are refuted, or are undecided."""
    held = Counter(one.verdict for one in judged)
    names = {"PASS": "hold", "FAIL": "are refuted", "INCONCLUSIVE": "are undecided"}
    told = ", ".join(f"{held[kind]} {name}" for kind, name in names.items())
    return f"of {held.total() - held['']} predictions {told}"


def _judged(rule: Rule, results: Results) -> Judged:
    variants = list(dict.fromkeys(a.name for g in rule.groups for a in g)) or [
        variant.name for variant in rule.variants
    ]
    used = [trial for trial in results.trials if trial.variant.name in variants]
    evidence: dict[str, Any] = {"trials": [trial.id for trial in used]}
    try:
        missing = len(variants) * results.plan.repeats - len(used)
        if missing:
            raise Undecided(f"{missing} trials were not run, {results.why}")
        verdict, found, numbers = RULES[rule.name](rule, results)
    except Undecided as undecided:
        return Judged(rule.says, f"not decided, {undecided}", "INCONCLUSIVE", evidence)
    return Judged(rule.says, found, verdict, evidence | numbers)


Found = tuple[str, str, dict[str, Any]]  # verdict, what was found, numbers


def _same_verdict(rule: Rule, results: Results) -> Found:
    kinds = _kinds(rule.variants, results)
    seen = sorted({kind for several in kinds.values() for kind in several})
    if "INCONCLUSIVE" in seen:
        raise Undecided("a trial is itself INCONCLUSIVE")
    return verdict_of(len(seen) == 1), " and ".join(seen), {"verdicts": kinds}


def _verdict(rule: Rule, results: Results) -> Found:
    wanted, wrong = rule.given["kinds"], []
    kinds = _kinds(rule.variants, results)
    for name, seen in kinds.items():
        want = wanted.get(name, wanted.get("*"))
        if want is None:
            continue
        labels = {t.done.verdict.label for t in results.trials if t.variant.name == name}
        if set(seen) != {want} and labels != {want}:
            wrong.append(f"{name}: {', '.join(sorted(labels))}")
    if wrong and any("INCONCLUSIVE" in one for one in wrong):
        raise Undecided("; ".join(wrong))
    return verdict_of(not wrong), "; ".join(wrong) or "they are", {"verdicts": kinds}


def _kinds(variants: Sequence[Variant], results: Results) -> dict[str, list[str]]:
    return {
        variant.name: [t.done.verdict.kind for t in results.of(variant)] for variant in variants
    }


def _fault(rule: Rule, results: Results) -> Found:
    trials = results.of(results.plan.variant(rule.given["variant"]))
    silent, said = [], ""
    for trial in trials:
        end, text = trial.done.evidence.end, str(rule.given["says"])
        told = [end.message, end.traceback] if end is not None else []
        told += [*trial.done.verdict.because, *trial.done.evidence.output]
        line = next((x for one in told for x in one.splitlines() if text in x), "")
        said = said or line.strip()
        if trial.done.verdict.kind == "PASS" or not line:
            silent.append(trial.done.verdict.label)
    if not silent:
        return "PASS", without_paths(said)[:160], {}
    return "FAIL", f"{', '.join(silent)}, which says nothing of it", {}


def _different(rule: Rule, results: Results) -> Found:
    equal = []
    for a, b in combinations(rule.variants, 2):
        one, other = results.of(a)[0], results.of(b)[0]
        paths = compare_paths(one.done.evidence, other.done.evidence)
        counts = [tuple(t.values.get(n) for n in COUNTED) for t in (one, other)]
        counted = None not in (*counts[0], *counts[1])
        if paths.kind == "INCONCLUSIVE" and not counted:
            raise Undecided("; ".join(paths.because))
        if paths.kind != "PASS" and (not counted or counts[0] == counts[1]):
            equal.append(f"{a.name} and {b.name}")
    if equal:
        return "FAIL", f"INVALID, {'; '.join(equal)} ran the same", {"equal": equal}
    return "PASS", f"{len(rule.variants)} of {len(rule.variants)}", {}


def _named_code(results: Results) -> list[Judged]:
    """Check that no two variants that differ in a factor that selects code ran the same code."""
    first = [trial.done for trial in results.trials if trial.number == 0]
    says = "variants that name other code run other code"
    if equal := list(same_paths(first)):
        names = {t.id: t.variant.name for t in results.trials}
        pairs = "; ".join(f"{names[a.id]} and {names[b.id]}" for a, b in equal)
        ids = {"trials": [done.id for pair in equal for done in pair]}
        return [Judged(says, f"INVALID, {pairs} ran the same", "FAIL", ids)]
    return []


def _losses(trial: Trial) -> list[float]:
    if trial.done.verdict.kind != "PASS":
        raise Undecided(f"{trial.variant.name} ended as {trial.done.verdict.label}")
    if not trial.losses:
        raise Undecided(f"{trial.variant.name} has no losses")
    return trial.losses


def _equal_loss(rule: Rule, results: Results) -> Found:
    apart = 0.0
    for group in rule.groups:
        curves = [_losses(trial) for variant in group for trial in results.of(variant)]
        for step in zip(*curves, strict=True):
            apart = max(apart, max(step) - min(step)) if all(map(math.isfinite, step)) else math.inf
    limit = rule.given["limit"]
    found = "bit for bit" if apart == 0 else f"at most {apart:.2g} nats apart"
    return verdict_of(apart <= limit), found, {"apart": apart}


def _last_apart(rule: Rule, results: Results, worst: Callable[..., float]) -> float:
    """Worst pairwise difference of the variants' mean last losses, relative to the smaller."""
    found = []
    for group in rule.groups:
        ends = []
        for variant in group:
            curves = [_losses(trial) for trial in results.of(variant)]
            late = [c[-max(1, round(LATE * len(c))) :] for c in curves]
            ends.append(statistics.fmean(x for curve in late for x in curve))
        found += [abs(a - b) / min(abs(a), abs(b)) for a, b in combinations(ends, 2)]
    if not all(map(math.isfinite, found)):
        raise Undecided("a loss is not finite")
    return worst(found)


def _loss_within(rule: Rule, results: Results) -> Found:
    apart = _last_apart(rule, results, max)
    found = f"at most {apart:.2%} apart"
    return verdict_of(apart <= rule.given["limit"]), found, {"apart": apart}


def _loss_apart(rule: Rule, results: Results) -> Found:
    apart = _last_apart(rule, results, min)
    return verdict_of(apart > rule.given["limit"]), f"{apart:.2%} apart or more", {"apart": apart}


def _equal_gradients(rule: Rule, results: Results) -> Found:
    differ = []
    for group in rule.groups:
        digests = {}
        for trial in (t for variant in group for t in results.of(variant)):
            found = (trial.done.evidence.result or {}).get("gradients")
            if found is None:
                raise Undecided(f"{trial.variant.name} has no digest of its gradients")
            digests.setdefault(found, trial.variant.name)
        if len(digests) > 1:
            differ.append(" and ".join(digests.values()))
    return verdict_of(not differ), "; ".join(differ) + " differ" * bool(differ) or "they do", {}


def _middles(group: Sequence[Variant], of: str, results: Results) -> list[float]:
    found = [results.middle(variant, of) for variant in group]
    for variant, value in zip(group, found, strict=True):
        if math.isnan(value):
            ended = {t.done.verdict.label for t in results.of(variant)} - {"PASS"}
            raise Undecided(
                f"{variant.name} ended as {', '.join(sorted(ended))}" if ended
                else f"{of} of {variant.name} were not measured; not every device has them"
            )  # fmt: skip
    return found


def _spread(rule: Rule, results: Results) -> tuple[float, str]:
    of = rule.given["of"]
    values = _middles(rule.variants, of, results)
    low, high = min(values), max(values)
    share = (high - low) / high if high else 0.0
    return share, f"{low:,.6g} to {high:,.6g}{' ' + UNITS.get(of, 'MiB')}".rstrip()


def _equal(rule: Rule, results: Results) -> Found:
    share, found = _spread(rule, results)
    return verdict_of(share <= rule.given["within"]), f"{share:.2%} apart, {found}", {}


def _differs(rule: Rule, results: Results) -> Found:
    share, found = _spread(rule, results)
    return verdict_of(share > rule.given["by"]), f"{share:.2%} apart, {found}", {}


def _ratio(rule: Rule, results: Results, base: Any, value: Any) -> Ratio:
    """Ratio value / base over all repeats and all groups, paired by repeat."""
    of, pairs = rule.given["of"], []
    for group in rule.groups:
        chosen = [[a for a in group if word(a.cell[rule.given["factor"]]) == word(v)]
                  for v in (base, value)]  # fmt: skip
        if all(chosen):
            _middles([chosen[0][0], chosen[1][0]], of, results)
            pairs += zip(*(results.values(variants[0], of) for variants in chosen), strict=True)
    if not pairs:
        raise Undecided(f"{word(base)} and {word(value)} are compared by no two variants")
    if not all(a > 0 and b > 0 for a, b in pairs):
        raise Undecided(f"{of} is 0 in some variant, which has no ratio")
    found = paired_ratio(*zip(*pairs, strict=True))
    if found.n == 1 and of in EXACT:
        return Ratio(found.value, found.value, found.value, 1)
    return found


def within(low: float, high: float, least: float | None, most: float | None) -> str:
    """PASS for an interval inside the bounds, FAIL outside, else INCONCLUSIVE."""
    least, most = -math.inf if least is None else least, math.inf if most is None else most
    if math.isnan(low) or math.isnan(high):
        return "INCONCLUSIVE"
    if high < least or low > most:
        return "FAIL"
    return "PASS" if least <= low and high <= most else "INCONCLUSIVE"


def _predicted(given: dict[str, Any], low: float, high: float) -> str:
    if given["least"] is None and given["most"] is None:
        return ""
    return within(low, high, given["least"], given["most"])


def _cost(rule: Rule, results: Results) -> Found:
    ratio = _ratio(rule, results, rule.given["base"], rule.given["value"])
    numbers = {"ratio": ratio.value, "low": ratio.low, "high": ratio.high, "pairs": ratio.n}
    return _predicted(rule.given, ratio.low, ratio.high), str(ratio), numbers


def _rank_order(rule: Rule, results: Results) -> Found:
    """Compare each value with the next; FAIL if an order is reversed beyond its interval."""
    told, verdicts, numbers = [], set(), {}
    for small, large in pairwise(rule.given["order"]):
        ratio = _ratio(rule, results, small, large)
        verdicts.add(within(ratio.low, ratio.high, 1.0, None) if ratio.value != 1 else "FAIL")
        told.append(f"{word(large)} {ratio} x {word(small)}")
        numbers[f"{word(large)}/{word(small)}"] = ratio.value
    verdict = next(v for v in ("FAIL", "INCONCLUSIVE", "PASS") if v in verdicts)
    return verdict, ", ".join(told), numbers


def _points(
    rule: Rule, group: Sequence[Variant], results: Results
) -> tuple[list, list, list[Variant]]:
    factor = rule.given["factor"]
    variants = sorted(group, key=lambda variant: variant.cell[factor])
    return (
        [variant.cell[factor] for variant in variants],
        _middles(variants, rule.given["of"], results),
        variants,
    )


def _linear(rule: Rule, results: Results) -> Found:
    """FAIL if variants are off the line by more than the repeats explain, by an F test."""
    of, told, verdicts, numbers = rule.given["of"], [], set(), {}
    for group in rule.groups:
        x, y, variants = _points(rule, group, results)
        line = fit_line(x, y)
        verdicts.add("PASS" if line.r2 >= rule.given["r2"] else _off(x, variants, of, results))
        name, unit = _rest(group, rule), f" {UNITS.get(of, 'MiB')}".rstrip()
        told.append(
            f"{name}R2 {line.r2:.4f}, {line.slope:.4g} [{line.low:.4g}, {line.high:.4g}]{unit} "
            f"for each, furthest off {line.worst:+.1%} of the mean at {line.worst_at:g}"
        )
        numbers[name or "fit"] = line.__dict__
    verdict = next(v for v in ("FAIL", "INCONCLUSIVE", "PASS") if v in verdicts)
    return verdict, "; ".join(told), numbers


def _off(x: list[float], variants: Sequence[Variant], of: str, results: Results) -> str:
    """Lack-of-fit test: residuals of the variants' means against the spread of their repeats."""
    turns = [results.values(variant, of) for variant in variants]
    means = [statistics.fmean(values) for values in turns]
    fit = fit_line(x, means)
    n, k = len(turns[0]), len(turns)
    lack = sum(n * (m - fit.at_0 - fit.slope * at) ** 2 for m, at in zip(means, x, strict=True))
    pure = sum((v - m) ** 2 for m, values in zip(means, turns, strict=True) for v in values)
    if n == 1:
        return "INCONCLUSIVE" if of in TIMED else "FAIL"
    if pure == 0:
        return "FAIL"
    ratio = (lack / (k - 2)) / (pure / (k * (n - 1)))
    return "FAIL" if fisher.sf(ratio, k - 2, k * (n - 1)) < ALPHA else "INCONCLUSIVE"


def _exponent(rule: Rule, results: Results) -> Found:
    told, verdicts, numbers = [], set(), {}
    for group in rule.groups:
        x, y, _ = _points(rule, group, results)
        if min(y) <= 0:
            raise Undecided(f"{rule.given['of']} is 0 somewhere, which has no exponent")
        fit = fit_exponent(x, y)
        verdicts.add(_predicted(rule.given, fit.low, fit.high))
        name = _rest(group, rule)
        told.append(f"{name}{fit}")
        numbers[name or "fit"] = fit.__dict__
    verdict = next(v for v in ("FAIL", "INCONCLUSIVE", "PASS", "") if v in verdicts)
    return verdict, "; ".join(told), numbers


def _rest(group: Sequence[Variant], rule: Rule) -> str:
    """Values common to the variants of a group, before a colon; "" if there is one group."""
    if len(rule.groups) == 1 or rule.given["factor"] == VARIANT:
        return ""
    cell = group[0].cell
    return ", ".join(f"{n}={word(v)}" for n, v in cell.items() if n != rule.given["factor"]) + ": "


RULES: dict[str, Callable[[Rule, Results], Found]] = {
    "same_verdict": _same_verdict,
    "verdict": _verdict,
    "fault": _fault,
    "different_programs": _different,
    "equal_gradients": _equal_gradients,
    "equal_loss": _equal_loss,
    "loss_within": _loss_within,
    "loss_apart": _loss_apart,
    "equal": _equal,
    "differs": _differs,
    "cost": _cost,
    "linear_in": _linear,
    "exponent_in": _exponent,
    "rank_order": _rank_order,
}
