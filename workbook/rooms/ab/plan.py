"""A plan of variants, checked before anything runs; its grammar is in workbook.rooms.ab."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Any

import torch

from nsa.spelling import nearest
from whyhung.process import script
from workbook.lab.search import factors as known
from workbook.lab.search.candidates import Cell, word
from workbook.lab.search.plan import Plan
from workbook.lab.training import check_switch, check_whole
from workbook.rooms.ab import rules
from workbook.rooms.ab.rules import VARIANT

# Factors that change what is learnt: losses of variants that differ in one are not comparable.
LEARNT = (
    "preset", "branch", "layers", "dim", "tokens", "batch", "seed", "data", "lr", "changes",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One variant: its name, its place in the plan, and the factors of its trial."""

    name: str
    cell: Cell  # the varied factors; {"variant": name} if variants have names
    trial: Cell  # the plan's factors with their values


@dataclass(frozen=True)
class ABPlan:
    """Plan of a parameter file. Raises ValueError, before any trial, for what cannot be run or
    judged; for an unknown name, the error gives the nearest known one."""

    factors: dict[str, list[Any]] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    never: list[dict[str, Any]] = field(default_factory=list)
    cover: str = "all"
    subject: str = known.TRAINING_SUBJECT
    steps: int = 6
    warmup: int = 2
    repeats: int = 3
    count: bool = False
    oracles: list[str] = field(default_factory=list)
    deadline_s: float = 600.0
    question: str = ""
    predicts: str = ""
    expect: list[Any] = field(default_factory=list)
    trials: Plan = field(init=False, compare=False)
    listed: tuple[Variant, ...] = field(init=False, compare=False)
    rules: tuple[rules.Rule, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        check_whole(self, {"steps": 1, "warmup": 0, "repeats": 1})
        check_switch(self, "count")
        if self.steps <= self.warmup and not script.is_script(self.subject):
            raise ValueError(
                f"steps={self.steps} leave none to time after warmup={self.warmup}; "
                f"steps={self.warmup + 3} would do"
            )
        if bool(self.factors) == bool(self.variants):
            got = "both factors and variants" if self.variants else "no variants"
            raise ValueError(
                f"{got}: a plan has factors, as {{checkpoint: ['', all]}}, or variants by name, as "
                "{plain: {}, watched: {anomaly: true}}"
            )
        object.__setattr__(self, "trials", self._plan())
        object.__setattr__(self, "listed", tuple(self._listed()))
        self._check_variants()
        object.__setattr__(self, "rules", tuple(rules.rule(one, self) for one in self.expect))

    @classmethod
    def on(cls, where: str, threads: int | None, **given: Any) -> ABPlan:
        """Return the plan on a device, "cpu" or "cuda", unless the plan sets the device itself."""
        if given.get("subject", known.TRAINING_SUBJECT) == known.TRAINING_SUBJECT:
            own = given.get("settings") or {}
            named = {*own, *given.get("factors", ()), *chain(*given.get("variants", {}).values())}
            place = {"device": where, "threads": threads}
            given["settings"] = {k: v for k, v in place.items() if k not in named} | own
        return cls(**given)

    def __str__(self) -> str:
        left = [f"left out: {one}" for one in self.trials.left_out]
        says = [f"predicted: {one.says}" for one in self.rules]
        turns = (
            f"{len(self.listed)} variants, each {self.repeats} times, {self.steps} steps a trial"
        )
        asks = [text for text in (self.question, self.predicts) if text]
        return "\n".join([*asks, turns, *(f"  {one.name}" for one in self.listed), *left, *says])

    @property
    def varied(self) -> dict[str, list[Any]]:
        """Varied factors by name, with the values that are run."""
        if self.variants:
            return {VARIANT: list(self.variants)}
        return {name: values for name, values in self.trials.values.items() if len(values) > 1}

    def variant(self, name: str) -> Variant:
        """Return the variant of this name; ValueError for an unknown one, naming the nearest."""
        for one in self.listed:
            if one.name == name:
                return one
        raise ValueError(f"no variant {name!r}; {nearest(name, [one.name for one in self.listed])}")

    def alike(self) -> dict[tuple, list[Variant]]:
        """Group variants by what they train: losses are comparable within a group."""
        groups: dict[tuple, list[Variant]] = {}
        for one in self.listed:
            what = [(name, one.trial[name]) for name in LEARNT if name in one.trial]
            groups.setdefault(_key(what), []).append(one)
        return groups

    def _plan(self) -> Plan:
        factors = self.factors or self._of_variants()
        own = {"measure": True} | ({"count": True} if self.count else {})
        if clash := sorted(own.keys() & (self.settings.keys() | factors.keys())):
            raise ValueError(f"{clash[0]} is set by the plan itself: every trial is measured")
        ours = self.subject == known.TRAINING_SUBJECT
        return Plan(
            factors,
            subject=self.subject,
            settings=self.settings | own,
            never=self.never,
            steps=self.steps,
            deadline_s=self.deadline_s,
            # In our subject, arrival and finite watch a separate step: see lab.measure.steps.
            oracles=self.oracles if ours or self.oracles else None,
            cover=self.cover,
            question=self.question,
        )

    def _of_variants(self) -> dict[str, list[Any]]:
        """Factors, the base's value first; a variant without a factor has its default."""
        for name, variant in self.variants.items():
            if not isinstance(variant, dict):
                raise ValueError(
                    f"variant {name!r} is {variant!r}; it must be a mapping of factors"
                )
        names = dict.fromkeys(name for variant in self.variants.values() for name in variant)
        if not names:
            raise ValueError("no variant names a factor, so all are equal; {anomaly: true} is one")
        found = {}
        for name in names:
            values: list[Any] = []
            for variant in self.variants.values():
                value = variant[name] if name in variant else self._default(name)
                if not any(type(value) is type(one) and value == one for one in values):
                    values.append(value)
            found[name] = values
        return found

    def _default(self, name: str) -> Any:
        factor = known.find(self.subject, name)
        if factor is None:
            raise ValueError(
                f"{name!r} is a setting of {self.subject}, whose default is unknown here; "
                "give it in every variant"
            )
        return factor.default

    def _listed(self) -> list[Variant]:
        if not self.variants:
            varied = self.varied
            return [
                Variant(", ".join(f"{n}={word(cell[n])}" for n in varied) or "the only one",
                    {n: cell[n] for n in varied}, dict(cell))
                for cell in self.trials.cells()
            ]  # fmt: skip
        found = []
        for name, variant in self.variants.items():
            cell = {
                n: variant[n] if n in variant else self._default(n) for n in self.trials.factors
            }
            if why := self.trials.why_not(cell):
                raise ValueError(f"variant {name!r} cannot be run: {why}")
            found.append(Variant(name, {VARIANT: name}, cell))
        return found

    def _check_variants(self) -> None:
        for a, b in combinations(self.listed, 2):
            if self.trials.spec(a.trial) == self.trials.spec(b.trial):
                raise ValueError(
                    f"variants {a.name!r} and {b.name!r} are equal: nothing is compared"
                )
        if len(self.listed) < 2:
            out = f"; left out: {'; '.join(self.trials.left_out)}" * bool(self.trials.left_out)
            raise ValueError(
                f"one variant, {self.listed[0].name}, has none to be compared with{out}"
            )


def _key(pairs: list[tuple[str, Any]]) -> tuple:
    return tuple((name, json.dumps(value, sort_keys=True)) for name, value in pairs)


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise ValueError for notebook parameters that cannot be run."""
    given = {name: values[name] for name in values if name not in ("device", "budget_s")}
    given["factors"] = {} if given["variants"] else given["factors"]
    where = "cuda" if torch.cuda.is_available() and values["device"] != "cpu" else "cpu"
    if where == "cuda" or values["device"] != "cuda":  # otherwise it is for another machine
        ABPlan.on(where, None, **given)
