"""Plans: varied factors, fixed settings, excluded combinations, and the resulting trials."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from math import prod
from typing import Any

from nsa.spelling import choice, nearest
from whyhung.process import script
from whyhung.process.runner import ACTIONS, Spec, check_subject
from whyhung.verdict import KINDS
from workbook.lab.search import factors as known
from workbook.lab.search.candidates import Cell, position, word
from workbook.lab.search.covering import cover
from workbook.lab.search.factors import TRAINING_SUBJECT
from workbook.lab.training import check_switch, check_whole

STRENGTH = {"all": 0, "pairs": 2, "triples": 3}
ATTEMPT = "NSA_ATTEMPT"  # variable that distinguishes repeated trials of one cell


@dataclass(frozen=True)
class Plan:
    """Trials of one subject: `settings` are fixed, each of `factors` takes its values in turn.

    Values of the training subject and of factors common to all subjects are checked; values that
    no cell can have are removed from `values`, see `left_out`. Raises ValueError for unknown names
    or illegal values, naming the nearest, and for a plan with no values left.
    """

    factors: dict[str, list[Any]]  # the first value of each is its default
    subject: str = TRAINING_SUBJECT
    settings: dict[str, Any] = field(default_factory=dict)
    # Excluded combinations, each a mapping of factors to a value or a list of them.
    never: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 3  # of every trial, like all fields down to `oracles`
    deadline_s: float | None = None  # before a trial's deadline_factor
    predicted_s: float | None = None
    stall_s: float = 5.0
    on_hang: str = "kill"  # or "report": action on a certified hang, ...
    on_stall: str = "report"  # ... and a stall that could end by itself
    oracles: list[str] | None = None  # None: arrival and finite, and ranks if there are several
    cover: str = "all"  # combinations in a sweep; or cells covering all "pairs", or "triples"
    kind: str | None = None  # the verdict that a bisection searches for ...
    most: int = 40  # ... in at most this many trials
    attempts: int = 1  # runs of a passing cell
    # Values that showed the fault elsewhere: start of a bisection, all others at the defaults.
    seen: dict[str, Any] = field(default_factory=dict)
    calibrate: bool = False  # estimate times per cell with smaller trials beforehand
    question: str = ""
    left_out: tuple[str, ...] = field(default=(), init=False, compare=False)
    values: dict[str, list[Any]] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        check_subject(self.subject)
        self._check_options()
        for name in ("settings", "factors"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a mapping of names")
        if twice := sorted(self.settings.keys() & self.factors.keys()):
            raise ValueError(f"both fixed and varied: {', '.join(twice)}; keep one of the two")
        for name, value in self.settings.items():
            self._check(name, [value])
        for name, values in self.factors.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"factor {name!r} wants a list of values, got {values!r}")
            self._check(name, values)
        if "deadline_factor" in self.settings | self.factors and self.deadline_s is None:
            raise ValueError("deadline_factor has nothing to multiply; give deadline_s in seconds")
        if self.oracles:
            from workbook.lab import oracles  # with torch, after what needs none

            oracles.check(self.oracles)
        self._check_snapshot()
        never = self.never
        if not isinstance(never, list) or not all(isinstance(one, dict) and one for one in never):
            raise ValueError(f"never={never!r} must be a list of mappings, e.g. [{{layers: 6}}]")
        if not isinstance(self.seen, dict):
            raise ValueError(f"seen={self.seen!r} must be a mapping, e.g. {{layers: 6}}")
        for key, one in (*(("never", one) for one in never), ("seen", self.seen)):
            self._check_varied(key, one)
        self._leave_out()
        if why := self.why_not(self.base | self.seen):
            raise ValueError(f"what was seen cannot be run: {why}")

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Plan:
        """Create the plan from a YAML file's content. ValueError for an unknown key."""
        names = [f.name for f in fields(cls) if f.init]
        found = {name: value for name, value in found.items() if name != "screen"}  # old plans
        for name in found:
            if name not in names:
                raise ValueError(f"a plan has no {name!r}; {nearest(name, names)}")
        if not found.get("factors"):
            raise ValueError("a plan needs factors, e.g. {layers: [1, 6]}")
        return cls(**found)

    @property
    def base(self) -> Cell:
        """The cell with every factor at its default."""
        return {name: values[0] for name, values in self.values.items()}

    def why_not(self, part: Mapping[str, Any]) -> str:
        """Return the reason why a cell, or a part of one, is not run; "" if it is."""
        for one in self.never:
            if all(name in part and _among(part[name], given) for name, given in one.items()):
                return "never: " + ", ".join(f"{name}={word(part[name])}" for name in one)
        settled = self._settled(part)
        for rule in known.rules(self.subject):
            decided = all(name in part or name not in self.factors for name in rule.names)
            if decided and (why := rule.broken(settled)):
                return why
        return ""

    def legal(self, part: Mapping[str, Any]) -> bool:
        """Return True if a cell, or a part of one, may be run."""
        return not self.why_not(part)

    def cells(self) -> Iterator[Cell]:
        """The cells of a sweep, the base first."""
        yield self.base
        if size := STRENGTH[self.cover]:
            done = [self.base]
            yield from cover(self.values, legal=self.legal, strength=size, tested=done)
            return
        for values in product(*self.values.values()):
            cell = dict(zip(self.values, values, strict=True))
            if cell != self.base and self.legal(cell):
                yield cell

    def size(self) -> int:
        """Number of combinations, legal or not."""
        return prod(len(values) for values in self.values.values())

    def spec(self, cell: Mapping[str, Any], attempt: int = 0) -> Spec:
        """Return the trial of a cell; each attempt is a separate trial."""
        whole: dict[str, Any] = {}
        env: dict[str, str] = {}
        observers, handed = [], {}
        for name, value in self._settled(cell).items():
            factor = known.find(self.subject, name)
            if factor is None or factor.place == "settings" or name == "seed":
                handed[name] = value
            if factor is None:
                continue
            if factor.place == "spec" and not name.startswith(known.ENVIRONMENT):
                whole[name] = value
            env |= factor.env(value)
            if factor.slows > 1 and value != factor.default:
                observers.append(f"{name}={value}" if name == "memory_snapshot" else name)
        if attempt:
            env[ATTEMPT] = str(attempt)
        usual = ["arrival", "finite", *(["ranks"] if whole["ranks"] > 1 else [])]
        if script.is_script(self.subject):  # its model is unknown
            usual = []
            handed.pop("seed", None)
        return Spec(
            subject=self.subject,
            settings=handed,
            steps=self.steps,
            observers=tuple(observers),
            oracles=tuple(usual if self.oracles is None else self.oracles),
            env=env,
            **whole,
        )

    def options(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        """Supervision of a cell's trial: options of `runner.run`.

        Deadlines are part of a trial's id; the actions on a hang or a stall are not.
        """
        settings, slower = self._settled(cell), 1.0
        for name, value in settings.items():
            factor = known.find(self.subject, name)
            if factor is not None and value != factor.default:
                slower *= factor.slows
        deadline_s = self.deadline_s and self.deadline_s * settings["deadline_factor"]
        times = {"predicted_s": self.predicted_s, "stall_s": self.stall_s}
        actions = {"on_hang": self.on_hang, "on_stall": self.on_stall}
        return times | actions | {"deadline_s": deadline_s, "factor": slower}

    def _settled(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Complete the part with the plan's settings, and defaults for the rest."""
        defaults = {name: factor.default for name, factor in known.known(self.subject).items()}
        return defaults | self.settings | dict(part)

    def _check(self, name: str, values: Sequence[Any]) -> None:
        factor = known.find(self.subject, name)
        for index, value in enumerate(values):
            if factor is not None:
                factor.check(value)
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                raise ValueError(f"{name}={value!r} does not fit JSON; plain values do") from None
            if _among(value, values[:index]):
                raise ValueError(f"factor {name!r} has {value!r} twice")

    def _check_options(self) -> None:
        check_whole(self, {"steps": 1, "most": 1, "attempts": 1})
        for name in ("deadline_s", "predicted_s", "stall_s"):
            value = getattr(self, name)
            if value is None and name != "stall_s":
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"{name}={value!r} must be a number of seconds greater than 0")
        check_switch(self, "calibrate")
        if self.calibrate and self.predicted_s is not None:
            raise ValueError(f"predicted_s={self.predicted_s} is given; calibrate would measure it")
        if self.calibrate and script.is_script(self.subject):
            raise ValueError(
                f"calibrate=true runs smaller layers and tokens, and {self.subject} is a script, "
                "which has neither; say predicted_s or deadline_s in seconds"
            )
        choice("cover", self.cover, STRENGTH)
        choice("on_hang", self.on_hang, ACTIONS)
        choice("on_stall", self.on_stall, ACTIONS)
        choice("kind", self.kind, (None, *KINDS))

    def _check_snapshot(self) -> None:
        for step in self._all("memory_snapshot"):
            if step is not None and step >= self.steps and not script.is_script(self.subject):
                raise ValueError(
                    f"memory_snapshot={step} is never reached: a trial of steps={self.steps} ends "
                    f"with step {self.steps - 1}, counted from 0; steps={step + 1} would do"
                )

    def _all(self, name: str) -> list[Any]:
        """Return all values of that name in the plan."""
        return self.factors.get(name, [self.settings[name]] if name in self.settings else [])

    def _check_varied(self, key: str, part: Mapping[str, Any]) -> None:
        """Raise ValueError unless the plan varies these factors with these values (or lists)."""
        for name, given in part.items():
            if name not in self.factors:
                hint = nearest(name, self.factors)
                raise ValueError(f"{key} names {name!r}, which is not varied; {hint}")
            for value in given if isinstance(given, list) and key == "never" else [given]:
                try:
                    position(self.factors[name], value)
                except ValueError as error:
                    raise ValueError(f"{key}: {name}: {error}") from None

    def _leave_out(self) -> None:
        """Drop values that no cell can have, and note them in `left_out`."""
        if why := self.why_not({}):
            raise ValueError(f"the settings cannot be run: {why}")
        notes, kept = [], {}
        for name, values in self.factors.items():
            reasons = [self.why_not({name: value}) for value in values]
            told = list(zip(values, reasons, strict=True))
            kept[name] = [value for value, why in told if not why]
            notes += [f"{name}={word(value)}: {why}" for value, why in told if why]
        object.__setattr__(self, "left_out", tuple(notes))
        if empty := [name for name, values in kept.items() if not values]:
            raise ValueError(f"no value of {empty[0]} can be run: {'; '.join(notes)}")
        object.__setattr__(self, "values", kept)
        if why := self.why_not(self.base):
            raise ValueError(
                f"the defaults, the first value of every factor, cannot be run: {why}; "
                "put others first"
            )


def _among(value: Any, given: Any) -> bool:
    """Return True if `value` equals `given` or is in that list; True is not 1."""
    values = given if isinstance(given, list) else [given]
    return any(type(value) is type(one) and value == one for one in values)
