"""What a selfcheck planted and what it found, as tables."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

from nsa.experiments.selfcheck.faults.registry import Fault
from nsa.experiments.selfcheck.judged import Judged, matrix
from nsa.lab.process.trial import Outcome
from nsa.lab.verdict import KINDS
from nsa.workbook.files import plain, write_json

_PATH = re.compile(r"(?:/[\w.+-]+)*/([\w.+-]+/[\w.+-]+\.py)\b")


def planted(faults: Iterable[Fault]) -> pandas.DataFrame:
    """What there is to plant: what it should be called, what it takes, and what is done."""
    columns = ["fault", "control", "should be called", "ranks", "needs", "what is planted"]
    found = []
    for fault in faults:
        control, needs = "yes" if fault.control else "", fault.needs or "any machine"
        found.append((fault.name, control, fault.due, fault.ranks, needs, fault.text))
    return pandas.DataFrame(found, columns=columns).set_index("fault")


def write_evidence(folder: str | Path, rows: Iterable[Judged]) -> None:
    """Writes selfcheck.json into `folder`: a row a trial, files named by their last two parts."""
    found = [row.to_dict() | {"because": [_short(why) for why in row.because]} for row in rows]
    write_json(Path(folder, "selfcheck.json"), plain(found))


def matrix_of(rows: Sequence[Judged], *, controls: bool) -> pandas.DataFrame:
    """A row a fault: what was planted, what it was called in how many rounds, and the evidence.

    controls: True for these alone, False for none of them.
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
    """Counts: a row for each kind that was planted, a column for each that was found."""
    counts = matrix(rows)
    kinds = [kind for kind in KINDS if any(kind in row for row in counts.values())]
    return pandas.DataFrame(
        [[row.get(kind, 0) for kind in kinds] for row in counts.values()],
        index=pandas.Index(counts, name="planted"),
        columns=pandas.Index(kinds, name="found"),
    )


def hangs(rows: Sequence[Judged]) -> pandas.DataFrame:
    """A row a HANG: which sort, where, how long it had rested when it was named, and the rule."""
    columns = ["fault", "round", "found", "place", "rested, s", "trial, s", "rule"]
    found = [
        (row.name, row.round, row.label, row.place, row.named_s, row.seconds, row.rule)
        for row in rows
        if row.found == "HANG"
    ]
    table = pandas.DataFrame(found, columns=columns).round({"rested, s": 1, "trial, s": 1})
    return table.set_index("fault")


def watching(
    step: Mapping[str, Any], backward: Mapping[str, Any], counting: Outcome, foretold: Outcome
) -> pandas.DataFrame:
    """What counting costs the one, and how well the end of the other is foretold."""
    lines = []
    for what, settings, ended in (
        ("a step counted, over one that is not", step, counting),
        ("a backward's end, off by", backward, foretold),
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
    """Lines that do not depend on the machine's speed: what was planted, and what it was called."""
    lines = []
    for name, mine in _by_name(row for row in rows if not row.skipped).items():
        wrong = [row.label for row in mine if row.missed]
        said = f"not so: {', '.join(wrong)}" if wrong else "found"
        kind = "control" if mine[0].control else "fault"
        lines.append(f"{kind:8}{name}: {mine[0].due}, {said}")
    return lines


def to_metrics(rows: Iterable[Judged]) -> list[dict]:
    """A row of metrics.csv for each trial: seconds from its start to its verdict."""
    found = []
    for row in rows:
        line = {"operation": "selfcheck", "mode": "control" if row.control else "fault"}
        line |= {"metric": "time_to_verdict", "unit": "s", "x_name": "round", "x_value": row.round}
        config = {"fault": row.name, "expected": row.due, "found": row.label, "right": row.right}
        config |= {"rule": row.rule, "rested_s": row.named_s, "skipped": row.skipped}
        found.append(line | {"median": None if row.skipped else row.seconds, "config": config})
    return found


def _short(text: str) -> str:
    """With the last two parts of each file's path: re/__init__.py."""
    return _PATH.sub(r"\1", text)


def _by_name(rows: Iterable[Judged]) -> dict[str, list[Judged]]:
    found: dict[str, list[Judged]] = {}
    for row in rows:
        found.setdefault(row.name, []).append(row)
    return found
