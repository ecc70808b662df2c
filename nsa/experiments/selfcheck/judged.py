"""A planted fault judged: evidence that does not name it, and what it was called."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from nsa.experiments.selfcheck.faults.registry import Fault
from nsa.lab.watch.evidence import Evidence

NOTHING = "not run"
_FILE = re.compile(r"(?:[\w./-]*/)?nsa/experiments/selfcheck/faults/\w+\.py")
_MODULE = re.compile(r"nsa\.experiments\.selfcheck\.faults(?:\.\w+)*(?::\w+)?")
_HIDDEN = ("subject", "settings")  # of a spec


@dataclass(frozen=True)
class Judged:
    """One fault in one round: what it should be called, what it was called, and why."""

    name: str
    control: bool
    expected: tuple[str, ...]  # kinds of verdict
    what: str  # the verdict's own word for it, "" for any
    found: str  # the verdict's kind, or NOTHING with the reason in `skipped`
    found_what: str = ""
    rule: str = ""
    because: tuple[str, ...] = ()
    place: str = ""
    seconds: float = 0.0  # of the trial or trials, start-up included
    named_s: float | None = None  # from the freeze to the verdict, for a HANG
    round: int = 1
    skipped: str = ""
    text: str = ""
    # (seconds since the first step, share of the steps done), of the rank that the verdict is about
    track: tuple[tuple[float, float], ...] = ()

    @property
    def right(self) -> bool:
        """Called what it is; one that was not run is neither right nor wrong."""
        return self.found in self.expected and (not self.what or self.found_what == self.what)

    @property
    def missed(self) -> bool:
        return not self.right and not self.skipped

    @property
    def label(self) -> str:
        """HANG:blocked, PASS, ..."""
        return f"{self.found}:{self.found_what}" if self.found_what else self.found

    @property
    def due(self) -> str:
        """What it should be called: HANG:blocked, PASS or SLOW, ..."""
        kinds = " or ".join(self.expected)
        return f"{kinds}:{self.what}" if self.what else kinds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"right": self.right}


def line(row: Judged) -> str:
    """One row for people: right, skipped or MISSED, with what was found."""
    if row.skipped:
        return f"skipped  {row.name}: {row.skipped}"
    end = f"{row.name}: {row.label} in {row.seconds:.1f} s"
    if row.right:
        return f"right    {end}"
    return f"MISSED   {end}, planted was {row.due} [{row.rule}: {'; '.join(row.because)}]"


def matrix(rows: Iterable[Judged]) -> dict[str, dict[str, int]]:
    """{expected: {found: count}} of all that were run; controls have rows of their own."""
    table: dict[str, dict[str, int]] = {}
    for row in rows:
        if not row.skipped:
            due = " or ".join(row.expected)
            counts = table.setdefault(f"control {due}" if row.control else due, {})
            counts[row.found] = counts.get(row.found, 0) + 1
    return table


def blind(evidence: Evidence, fault: Fault) -> Evidence:
    """The evidence without what tells which fault it is of."""
    made = re.compile(rf"\b{re.escape(fault.subject.partition(':')[2])}\b")

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            hidden = _HIDDEN if "steps" in value else ()
            return {key: without(item) for key, item in value.items() if key not in hidden}
        if isinstance(value, list | tuple):
            return [without(item) for item in value]
        if isinstance(value, str):
            return made.sub("Subject", _MODULE.sub("subject", _FILE.sub("subject.py", value)))
        return value

    return Evidence.from_dict(without(evidence.to_dict()))
