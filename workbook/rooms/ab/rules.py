"""Rules that a plan's `expect` may name, checked against what the plan varies and measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nsa.spelling import choice, nearest
from whyhung.verdict import KINDS
from workbook.lab import CALLED, todays
from workbook.lab.measure.steps import MEASURED
from workbook.lab.search.candidates import Cell, ordered, position, word

if TYPE_CHECKING:
    from workbook.rooms.ab.plan import ABPlan, Variant

VARIANT = "variant"  # name of the varied factor if variants have names
METRICS = (*MEASURED, "startup")
TIMED = (
    "seconds",
    "processor",
    "forward",
    "backward",
    "optimizer",
    "startup",
)  # which vary by themselves
COUNTED = ("operations", "nodes")
UNITS = dict.fromkeys(TIMED, "s") | dict.fromkeys(COUNTED, "")  # all others: MiB
# Arguments of each: none, a number of at least 0, or a mapping of these keys ("!": required).
TAKES: dict[str, Any] = {
    "same_verdict": None,
    "verdict": {},  # text, or a kind for each variant
    "fault": {"variant": "!", "says": "!"},
    "different_programs": None,
    "equal_gradients": None,
    "equal_loss": 0.0,
    "loss_within": 0.0,
    "loss_apart": 0.0,
    "equal": {"of": "!", "within": 0.001},
    "differs": {"of": "!", "by": 0.001},
    "cost": {"of": "seconds", "factor": "!", "base": ..., "value": ..., "least": None,
             "most": None},
    "linear_in": {"of": "seconds", "factor": "!", "r2": 0.99},
    "exponent_in": {"of": "seconds", "factor": "!", "least": None, "most": None, "start": None},
    "rank_order": {"of": "seconds", "factor": "!", "order": "!"},
}  # fmt: skip
LOSSES = ("equal_loss", "loss_within", "loss_apart", "equal_gradients")
FEWEST = 3  # points of a line or a power law: two always fit exactly


@dataclass(frozen=True)
class Rule:
    """One expectation. says: the prediction in words; variants: those it applies to."""

    name: str
    given: dict[str, Any]
    variants: tuple[Variant, ...]
    says: str
    # Variants that differ only in the rule's factor or, for losses, that train alike.
    groups: tuple[tuple[Variant, ...], ...] = field(default=())


def rule(entry: Any, plan: ABPlan) -> Rule:
    """Return the rule of an entry of `expect` for the plan. ValueError if it does not fit."""
    name, given, where = _read(entry)
    given, where = (_todays(one, plan, name) for one in (given, where))
    given = _arguments(name, given)
    variants = _where(where, plan, name)
    if name in ("verdict", "fault"):
        _check_verdicts(name, given, plan)
    if "of" in given:
        _check_metric(name, given["of"], plan)
    groups: list[list[Variant]] = []
    if name in LOSSES:
        groups = [[one for one in group if one in variants] for group in plan.alike().values()]
    elif "factor" in given:
        given = _with_values(name, given, plan)
        groups = _others_equal(given, variants)
    if (name in LOSSES or "factor" in given) and not (groups := [g for g in groups if len(g) > 1]):
        raise ValueError(f"{name}: {_why_no_group(name, given)}")
    return Rule(
        name, given, tuple(variants), _words(name, given) + _told(where), tuple(map(tuple, groups))
    )


def _read(entry: Any) -> tuple[str, Any, dict[str, Any]]:
    if isinstance(entry, str):
        entry = {entry: None}
    if not isinstance(entry, Mapping) or not entry:
        raise ValueError(f"expect has {entry!r}; a rule is its name, or {{name: what it takes}}")
    where = entry.get("where") or {}
    names = [name for name in entry if name != "where"]
    if len(names) != 1 or not isinstance(where, dict):
        raise ValueError(f"expect has {dict(entry)!r}; each entry is one rule, and its `where`")
    if names[0] not in TAKES:
        raise ValueError(f"expect has no rule {names[0]!r}; {nearest(names[0], TAKES)}")
    return names[0], entry[names[0]], where


def _todays(given: Any, plan: ABPlan, name: str) -> Any:
    """Names of a rule as they are today: in stored plans the factor of named variants is "arm"."""
    if not isinstance(given, dict) or not (plan.variants or name == "fault"):
        return given
    found = todays(given)
    if "factor" in found:
        found["factor"] = CALLED.get(found["factor"], found["factor"])
    return found


def _arguments(name: str, given: Any) -> dict[str, Any]:
    takes = TAKES[name]
    if takes is None:
        if given not in (None, True):
            raise ValueError(f"{name} takes nothing, got {given!r}")
        return {}
    if isinstance(takes, float):
        return {"limit": _number(name, given)}
    if name == "verdict":
        kinds = given if isinstance(given, dict) else {"*": given}
        if not kinds:
            raise ValueError("verdict wants a kind, as PASS, or one for each variant")
        return {"kinds": kinds}
    if not isinstance(given, dict):
        raise ValueError(f"{name} takes a mapping of {', '.join(takes)}, got {given!r}")
    for key in given:
        if key not in takes:
            raise ValueError(f"{name} has no {key!r}; {nearest(key, takes)}")
    if missing := [key for key, default in takes.items() if default == "!" and key not in given]:
        raise ValueError(f"{name} needs {', '.join(missing)}")
    whole = takes | given
    for key in ("within", "by", "r2", "least", "most", "start"):
        if whole.get(key) is not None:
            whole[key] = _number(f"{name}: {key}", whole[key])
    if whole.get("r2", 0) > 1:
        raise ValueError(f"{name}: r2={whole['r2']:g} is more than 1, which no line has")
    low, high = whole.get("least"), whole.get("most")
    if low is not None and high is not None and low > high:
        raise ValueError(f"{name}: least={low:g} is above most={high:g}")
    return whole


def _number(name: str, value: Any) -> float:
    """Number of at least 0, also from text: YAML reads 1e-4, without a dot, as text."""
    try:
        found = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError):
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ValueError(f"{name} wants a number of at least 0, got {value!r}")
    return found


def _where(where: dict[str, Any], plan: ABPlan, name: str) -> list[Variant]:
    for factor, value in where.items():
        _check_varied(f"{name}: where", factor, plan)
        for one in value if isinstance(value, list) else [value]:
            _check_value(f"{name}: where: {factor}", plan.varied[factor], one)
    variants = [variant for variant in plan.listed if matches(variant.cell, where)]
    if len(variants) < 2 and name not in ("verdict", "fault"):
        raise ValueError(
            f"{name}: where={where} leaves {len(variants)} variant(s), so nothing to compare"
        )
    return variants


def _check_varied(what: str, factor: Any, plan: ABPlan) -> None:
    if factor not in plan.varied:
        hint = nearest(factor, plan.varied)
        raise ValueError(f"{what}: {factor!r} is not varied by this plan; {hint}")


def _check_value(what: str, values: list[Any], value: Any) -> None:
    try:
        position(values, value)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _check_metric(name: str, of: Any, plan: ABPlan) -> None:
    choice(f"{name}: of", of, METRICS)
    if of in COUNTED and not plan.count:
        raise ValueError(f"{name}: {of} are not counted; the plan's count: true counts them")
    if of in TIMED and name in ("equal", "differs"):
        raise ValueError(
            f"{name}: {of} vary by themselves; cost, with least and most, judges their interval"
        )


def _check_verdicts(name: str, given: dict[str, Any], plan: ABPlan) -> None:
    if name == "fault":
        plan.variant(given["variant"])
        return
    for variant, kind in given["kinds"].items():
        if variant != "*":
            plan.variant(variant)
        choice("verdict", str(kind).partition(":")[0], KINDS)


def _with_values(name: str, given: dict[str, Any], plan: ABPlan) -> dict[str, Any]:
    """Arguments completed with the plan's defaults; ValueError for values that it does not run."""
    factor = given["factor"]
    _check_varied(name, factor, plan)
    values = plan.varied[factor]
    if name in ("linear_in", "exponent_in"):
        kept = [v for v in values if not given.get("start") or v >= given["start"]]
        if not ordered(values) or len(kept) < FEWEST:
            raise ValueError(
                f"{name}: {factor}={values} must be {FEWEST} or more numbers in order, from start "
                "on: fewer lie on a line whatever they are"
            )
        return given
    if name == "rank_order":
        order = given["order"]
        if not isinstance(order, list) or len(order) < 2 or len(set(map(word, order))) < len(order):
            raise ValueError(f"rank_order: order={order!r} must be two or more values, each once")
        for value in order:
            _check_value(f"rank_order: {factor}", values, value)
        return given
    base = values[0] if given["base"] is ... else given["base"]
    others = [value for value in values if word(value) != word(base)]
    if given["value"] is ... and len(others) != 1:
        raise ValueError(f"cost: {factor} has several values beside {word(base)}; say which: value")
    value = others[0] if given["value"] is ... else given["value"]
    for one in (base, value):
        _check_value(f"cost: {factor}", values, one)
    if word(base) == word(value):
        raise ValueError(f"cost: base and value of {factor} are both {word(base)}")
    return given | {"base": base, "value": value}


def _others_equal(given: dict[str, Any], variants: list[Variant]) -> list[list[Variant]]:
    """Groups of variants that differ only in the factor, restricted to the values of the rule."""
    named = given.get("order") or [given[key] for key in ("base", "value") if key in given]
    groups: dict[str, list[Variant]] = {}
    for variant in variants:
        value = variant.cell[given["factor"]]
        if named and not matches(variant.cell, {given["factor"]: named}):
            continue
        if given.get("start") is not None and value < given["start"]:
            continue
        rest = [f"{n}={word(v)}" for n, v in variant.cell.items() if n != given["factor"]]
        groups.setdefault(", ".join(rest), []).append(variant)
    least = FEWEST if "order" not in given and "base" not in given else 2
    return [group for group in groups.values() if len(group) >= least]


def _why_no_group(name: str, given: dict[str, Any]) -> str:
    if name in LOSSES:
        return "no two variants train the same (layers, dim, tokens, batch, seed, data, ...)"
    return f"no two variants differ in {given['factor']} alone; cover: all would run them"


def matches(cell: Cell, where: Mapping[str, Any]) -> bool:
    """Return True if a cell has these values, each given alone or as a list; True is not 1."""
    return all(
        any(type(cell[n]) is type(v) and cell[n] == v for v in (g if isinstance(g, list) else [g]))
        for n, g in where.items()
    )


def _told(where: dict[str, Any]) -> str:
    return f", where {', '.join(f'{n}={word(v)}' for n, v in where.items())}" if where else ""


def _words(name: str, given: dict[str, Any]) -> str:
    of, factor = given.get("of", ""), given.get("factor", "")
    if name == "verdict":
        kinds = given["kinds"]
        return "verdicts are " + ", ".join(
            str(kind) if variant == "*" and len(kinds) == 1 else f"{variant}: {kind}"
            for variant, kind in kinds.items()
        )
    if name == "cost":
        bounds = _bounds(given)
        versus = f"{of}, {factor}={word(given['value'])} / {word(given['base'])}"
        return versus + (f", {bounds}" if bounds else "")
    if name == "exponent_in":
        bounds = _bounds(given)
        start = f", from {given['start']:g} on" if given["start"] is not None else ""
        return f"{of} ~ {factor}^p" + (f", p {bounds}" if bounds else "") + start
    limit = given.get("limit", 0.0)
    exact = "losses agree bit for bit"
    return {
        "same_verdict": "all variants have the same verdict",
        "fault": f"{given.get('variant')} fails, and its error says {given.get('says')!r}",
        "different_programs": "the variants are different programs",
        "equal_gradients": "gradients agree bit for bit",
        "equal_loss": f"losses of all steps agree to {limit:g} nats" if limit else exact,
        "loss_within": f"the last losses agree to {limit:.3g} of their size",
        "loss_apart": f"the last losses are more than {limit:.3g} of their size apart",
        "equal": f"{of} is equal to {given.get('within', 0):.2%}",
        "differs": f"{of} differs by more than {given.get('by', 0):.2%}",
        "linear_in": f"{of} lie on a line over {factor}, R2 of {given.get('r2', 0):g} or more",
        "rank_order": f"{of} by {factor}: " + " < ".join(map(word, given.get("order", ()))),
    }[name]


def _bounds(given: dict[str, Any]) -> str:
    least, most = given["least"], given["most"]
    if least is not None and most is not None:
        return f"{least:g} to {most:g}"
    if least is not None:
        return f"at least {least:g}"
    return f"at most {most:g}" if most is not None else ""
