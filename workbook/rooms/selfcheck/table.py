"""Tables of what a selfcheck ran and found."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas

from whyhung.process.trial import Outcome
from whyhung.verdict import KINDS
from workbook.rooms.selfcheck.judged import FILE, Judged, matrix
from workbook.rooms.selfcheck.registry import Fault
from workbook.runs.files import plain, write_json

_PATH = re.compile(r"(?:/[\w.+-]+)*/([\w.+-]+/[\w.+-]+\.py)\b")
SOON_S = 20.0  # for hangs without a certificate


def certified_within_s(load: int) -> float:
    """Maximum time at rest of a hang before its certificate, in seconds."""
    return 15.0 if load <= 1 else 40.0


@dataclass(frozen=True)
class Aim:
    """Bound on a fraction of some rows, at each load: at most `most`, or at least `least`."""

    text: str
    among: Callable[[Judged], bool]
    so: Callable[[Judged], Any]
    most: float | None = None
    least: float = 0.0

    @property
    def wanted(self) -> str:
        if self.most is None:
            return f"at least {self.least:.0%}"
        return f"at most {self.most:.0%}" if self.most else "none"

    def mine(self, rows: Iterable[Judged]) -> list[Judged]:
        """Rows that the aim is about."""
        return [row for row in rows if not row.skipped and self.among(row)]

    def lost(self, rows: Iterable[Judged]) -> list[str]:
        """Names of the aim's rows that were not run, as far as known without running them."""
        late = [row for row in rows if row.late and self.among(replace(row, line_named=False))]
        return [f"{row.name}, load {row.load}, round {row.round}" for row in late]

    def against(self, rows: Iterable[Judged]) -> list[Judged]:
        """Rows that contradict the aim."""
        return [row for row in self.mine(rows) if bool(self.so(row)) == (self.most is not None)]

    def count(self, rows: Iterable[Judged], load: int) -> tuple[int, int]:
        """Number of matching rows and of all rows at that load."""
        mine = [row for row in self.mine(rows) if row.load == load]
        return sum(bool(self.so(row)) for row in mine), len(mine)

    def met(self, rows: Iterable[Judged], load: int) -> bool:
        count, of = self.count(rows, load)
        return count >= self.least * of if self.most is None else count <= self.most * of


def _certifiable(row: Judged) -> bool:
    return row.group == "hang" and row.certifiable


def _certified_soon(row: Judged) -> bool:
    return row.found == "HANG" and (row.named_s or 0.0) <= certified_within_s(row.load)


def _stays_stalled(row: Judged) -> bool:
    told = any(not one["withdrawn"] and one["label"].startswith("STALLED") for one in row.reports)
    return told or row.found == "STALLED"


def _named_soon(row: Judged) -> bool:
    # a certified one exceeds the requirement
    soon = row.found == "HANG" or (row.named_s or 0.0) <= SOON_S
    return row.right and row.line_named is not False and soon


AIMS = (
    Aim("healthy ones called HANG", lambda row: row.control, lambda row: row.ever("HANG"),
        most=0.0),
    Aim("healthy ones called STALLED, if only for a while", lambda row: row.control,
        lambda row: row.ever("STALLED"), most=0.02),
    Aim("healthy ones that stay STALLED", lambda row: row.control, _stays_stalled, most=0.0),
    Aim("hangs that can be certified and are", _certifiable, lambda row: row.found == "HANG",
        least=0.9),
    Aim("certified within 15 s, or 40 s above load 1", _certifiable, _certified_soon, least=0.9),
    Aim(f"other hangs named with their line within {SOON_S:.0f} s",
        lambda row: row.group == "hang" and not row.certifiable, _named_soon, least=0.9),
    Aim("hangs whose line or rank is in the first five lines",
        lambda row: row.group == "hang" and row.line_named is not None,
        lambda row: row.line_named, least=0.95),
)  # fmt: skip


def aims(rows: Sequence[Judged]) -> pandas.DataFrame:
    """Table with a row per aim, a column per load: "27 of 28", or "" if there was none."""
    found = {}
    for aim in AIMS:
        loads = {load: (aim.count(rows, load), aim.met(rows, load)) for load in loads_of(rows)}
        shown = {
            f"load {load}": f"{count} of {of}{'' if met else ', missed'}" if of else ""
            for load, ((count, of), met) in loads.items()
        }
        found[aim.text] = {"wanted": aim.wanted, **shown}
    return pandas.DataFrame.from_dict(found, orient="index").rename_axis("aim")


def loads_of(rows: Iterable[Judged]) -> list[int]:
    return sorted({row.load for row in rows if not row.skipped})


def accused(rows: Iterable[Judged]) -> pandas.DataFrame:
    """Table of healthy programs reported as STALLED or HANG: when, and if it was withdrawn."""
    columns = ["program", "load", "round", "called", "after s", "withdrawn", "in the end"]
    found = [
        (row.name, row.load, row.round, told["label"], told["rested_s"], told["withdrawn"],
         row.label)
        for row in rows
        for told in row.reports
        if row.control
    ]  # fmt: skip
    return pandas.DataFrame(found, columns=columns).set_index("program").round({"after s": 1})


def planted(faults: Iterable[Fault]) -> pandas.DataFrame:
    """Table of the faults to run: the group, the due label, and what is planted."""
    columns = ["fault", "group", "should be called", "ranks", "what is planted"]
    found = []
    for fault in faults:
        group = "control" if fault.control and fault.group == "planted" else fault.group
        found.append((fault.name, group, fault.due, fault.ranks, fault.text))
    return pandas.DataFrame(found, columns=columns).set_index("fault")


def write_evidence(folder: str | Path, rows: Iterable[Judged]) -> None:
    """Write selfcheck.json into `folder`: a row per trial, paths cut to their last two parts."""
    found = [row.to_dict() | {"because": [_short(why) for why in row.because]} for row in rows]
    write_json(Path(folder, FILE), plain(found))


def matrix_of(rows: Sequence[Judged], *, controls: bool) -> pandas.DataFrame:
    """Table with a row per fault: what was planted, its labels with counts, and the evidence.

    controls: True for controls only, False for no controls.
    """
    found = []
    for name, mine in _by_name(row for row in rows if row.control == controls).items():
        run = [row for row in mine if not row.skipped]
        labels = [row.label for row in run]
        shown = ", ".join(
            label if len(run) == 1 else f"{label} x{labels.count(label)}"
            for label in dict.fromkeys(labels)
        )
        said = next((row for row in run if row.missed), (run or mine)[0])
        line = {"fault": name, "planted": said.due, "found": shown or "not run"}
        line["right"] = f"{sum(row.right for row in run)} of {len(run)}" if run else ""
        line["seconds"] = max((row.seconds for row in run), default=float("nan"))
        line["why"] = said.skipped or _short("; ".join(said.because))
        found.append(line)
    columns = ["fault", "planted", "found", "right", "seconds", "why"]
    return pandas.DataFrame(found, columns=columns).set_index("fault").round({"seconds": 1})


def confusion(rows: Iterable[Judged]) -> pandas.DataFrame:
    """Table of counts: a row for each sort that was run, a column for each kind found."""
    counts = matrix(rows)
    kinds = [kind for kind in KINDS if any(kind in row for row in counts.values())]
    return pandas.DataFrame(
        [[row.get(kind, 0) for kind in kinds] for row in counts.values()],
        index=pandas.Index(counts, name="planted"),
        columns=pandas.Index(kinds, name="found"),
    )


def watching(
    step: Mapping[str, Any], backward: Mapping[str, Any], counting: Outcome, estimated: Outcome
) -> pandas.DataFrame:
    """Table of the cost of counting in a step, and the error of a backward's estimated end."""
    lines = []
    for what, settings, ended in (
        ("a step counted, over one that is not", step, counting),
        ("a backward's end, off by", backward, estimated),
    ):
        found = ended.result or {}
        size = "{preset}, {backend}, {layers} layers, {batch} x {tokens} tokens"
        line = {"what": what, "step": size.format(**{"batch": 1, **settings})}
        if "ratio" in found:
            line |= {"found": f"{found['ratio']:.3f}", "by": found["clock"]}
        elif "worst" in found:
            line["found"] = f"{found['worst']:.0%} of {found['seconds']:.2g} s at most"
            line["by"] = f"{found['looks']} looks after half of {found['nodes']:,} nodes"
        else:
            line |= {"found": "not measured", "by": ended.message or ended.status}
        lines.append(line)
    return pandas.DataFrame(lines).set_index("what")


def facts(rows: Sequence[Judged]) -> list[str]:
    """Lines independent of the machine's speed: what was planted, and the labels found."""
    lines = []
    for name, mine in _by_name(row for row in rows if not row.skipped).items():
        wrong = [row.label for row in mine if row.missed]
        said = f"not so: {', '.join(wrong)}" if wrong else "found"
        kind = "control" if mine[0].control else "fault"
        lines.append(f"{kind:8}{name}: {mine[0].due}, {said}")
    return lines


def to_metrics(rows: Iterable[Judged]) -> list[dict]:
    """Rows of metrics.csv, one per trial: seconds from its start to its verdict."""
    found = []
    for row in rows:
        line = {"operation": "selfcheck", "mode": "control" if row.control else "fault"}
        line |= {"metric": "time_to_verdict", "unit": "s", "x_name": "round", "x_value": row.round}
        config = {"fault": row.name, "expected": row.due, "found": row.label, "right": row.right}
        config |= {"rule": row.rule, "rested_s": row.named_s, "skipped": row.skipped}
        config |= {"load": row.load, "group": row.group, "batch": row.batch}
        line |= {"median": None if row.skipped else row.seconds, "device": row.device}
        found.append(line | {"config": config})
    return found


def _short(text: str) -> str:
    """Shorten each file's path to its last two parts: re/__init__.py."""
    return _PATH.sub(r"\1", text)


def _by_name(rows: Iterable[Judged]) -> dict[str, list[Judged]]:
    found: dict[str, list[Judged]] = {}
    for row in rows:
        found.setdefault(row.name, []).append(row)
    return found
