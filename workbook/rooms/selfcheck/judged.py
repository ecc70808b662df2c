"""Verdicts on faults and programs: blinded evidence, and the label that each got."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from whyhung.watch.evidence import Evidence
from workbook.rooms.selfcheck.registry import Fault

NOTHING = "not run"
LATE = "the time for all of them was over"
FILE = "selfcheck.json"  # of a run, a row a trial
_FILE = re.compile(r"(?:[\w./-]*/)?tests/whyhung/programs/\w+/\w+\.py")
_MODULE = re.compile(r"\bfaults\.\w+(?::\w+)?")
_HIDDEN = ("subject", "settings", "command")  # of a spec


@dataclass(frozen=True)
class Judged:
    """Verdict on a fault or program in one round at one load: due, found, and why."""

    name: str
    control: bool
    due: str  # "HANG:lock or STALLED": any of these is right
    found: str  # the verdict's kind, or NOTHING with the reason in `skipped`
    found_what: str = ""
    rule: str = ""
    because: tuple[str, ...] = ()
    place: str = ""
    seconds: float = 0.0  # of the trial or trials, start-up included
    named_s: float | None = None  # from the freeze to the report; None if nothing froze
    round: int = 1
    skipped: str = ""
    text: str = ""
    group: str = "planted"
    batch: str = "first"
    certifiable: bool = False
    load: int = 0  # busy loops beside it
    device: str = "unknown"  # name of the one on which the program ran
    line_named: bool | None = None  # in the first five lines of its page; None: none due
    # Each STALLED and HANG report: "label", "rested_s" then, "withdrawn" or not
    reports: tuple[dict[str, Any], ...] = ()

    @property
    def kinds(self) -> list[str]:
        """Kinds that are right."""
        return [one.partition(":")[0] for one in self.due.split(" or ")]

    @property
    def right(self) -> bool:
        """True if it was labelled as due; one that was not run is neither right nor wrong."""
        return any(one in (self.found, self.label) for one in self.due.split(" or "))

    @property
    def late(self) -> bool:
        """True if it was to be run and was not, though this machine could have run it."""
        return self.skipped == LATE

    @property
    def missed(self) -> bool:
        return not self.right and not self.skipped

    @property
    def label(self) -> str:
        """Label of the verdict: HANG:lock, PASS, ..."""
        return f"{self.found}:{self.found_what}" if self.found_what else self.found

    @property
    def sort(self) -> str:
        """Row of a matrix: what was planted, or the sort of program."""
        if self.group == "planted":
            kinds = " or ".join(self.kinds)
            return f"control {kinds}" if self.control else kinds
        return "hang, certifiable" if self.certifiable else self.group

    def ever(self, kind: str) -> bool:
        """Return True if it was ever labelled with this kind, even if that was withdrawn."""
        return kind in (self.found, *(told["label"].partition(":")[0] for told in self.reports))

    def __str__(self) -> str:
        if self.skipped:
            return f"skipped  {self.name}: {self.skipped}"
        end = f"{self.name}: {self.label} in {self.seconds:.1f} s"
        if self.right:
            return f"right    {end}"
        return f"MISSED   {end}, due was {self.due} [{self.rule}: {'; '.join(self.because)}]"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"right": self.right}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "Judged":
        """Read the output of `to_dict`, also after JSON."""
        known = {name: found[name] for name in cls.__dataclass_fields__ if name in found}
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in known.items()})


def read(files: Iterable[str | Path]) -> list[Judged]:
    """Read rows of sweeps: files of `nsa trial selfcheck --json`, or runs' selfcheck.json."""
    found = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    rows = [content["rows"] if isinstance(content, dict) else content for content in found]
    return [Judged.from_dict(row) for mine in rows for row in mine]


def of_run(folder: Path) -> list[Judged]:
    """Read rows of a stored run."""
    return read([folder / FILE])


def matrix(rows: Iterable[Judged]) -> dict[str, dict[str, int]]:
    """Count {sort: {found: count}} over all that were run."""
    table: dict[str, dict[str, int]] = {}
    for row in rows:
        if not row.skipped:
            counts = table.setdefault(row.sort, {})
            counts[row.found] = counts.get(row.found, 0) + 1
    return table


def blind(evidence: Evidence, fault: Fault) -> Evidence:
    """Return the evidence without anything that identifies its fault."""
    made = re.compile(rf"\b{re.escape(fault.where.partition(':')[2] or 'Subject')}\b")

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            hidden = _HIDDEN if {"steps", "command"} & value.keys() else ()
            return {key: without(item) for key, item in value.items() if key not in hidden}
        if isinstance(value, list | tuple):
            return [without(item) for item in value]
        if isinstance(value, str):
            return made.sub("Subject", _MODULE.sub("subject", _FILE.sub("subject.py", value)))
        return value

    return Evidence.from_dict(without(evidence.to_dict()))
