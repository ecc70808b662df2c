"""What a selfcheck planted and what it found, as tables."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

from nsa.experiments.selfcheck.faults.registry import Fault
from nsa.experiments.selfcheck.judged import Judged, due, matrix
from nsa.lab.process.trial import Outcome
from nsa.lab.verdict import KINDS
from nsa.workbook.files import plain, write_json

_PATH = re.compile(r"(?:/[\w.+-]+)*/([\w.+-]+/[\w.+-]+\.py)\b")
MATRIX = ("fault", "planted", "found", "right", "seconds", "why")


def planted(faults: Iterable[Fault]) -> pandas.DataFrame:
    """What there is to plant: what it should be called, what it takes, and what is done."""
    found = [
        {
            "fault": fault.name,
            "control": "yes" if fault.control else "",
            "should be called": due(fault.kinds, fault.what),
            "ranks": fault.ranks,
            "needs": fault.needs or "any machine",
            "what is planted": fault.text,
        }
        for fault in faults
    ]
    return pandas.DataFrame(found).set_index("fault")


def write_evidence(folder: str | Path, rows: Iterable[Judged]) -> None:
    """Writes selfcheck.json into `folder`: a row a trial, files named by their last two parts."""
    found = [row.to_dict() | {"because": [_short(why) for why in row.because]} for row in rows]
    write_json(Path(folder, "selfcheck.json"), plain(found))


def matrix_of(rows: Sequence[Judged], *, controls: bool | None = None) -> pandas.DataFrame:
    """A row a fault: what was planted, what it was called in how many rounds, and the evidence.

    controls: True for these alone, False for none of them, None for all.
    """
    found = []
    for name, mine in _by_name(rows, controls).items():
        first, run = mine[0], [row for row in mine if not row.skipped]
        labels = [row.label for row in run]
        shown = ", ".join(
            label if len(run) == 1 else f"{label} x{labels.count(label)}"
            for label in dict.fromkeys(labels)
        )
        missed = next((row for row in run if row.missed), None)
        said = missed or (run or mine)[0]
        found.append(
            {
                "fault": name,
                "planted": first.due,
                "found": shown or "not run",
                "right": f"{sum(row.right for row in run)} of {len(run)}" if run else "",
                "seconds": max((row.seconds for row in run), default=float("nan")),
                "why": first.skipped if not run else _short("; ".join(said.because)),
            }
        )
    return pandas.DataFrame(found, columns=list(MATRIX)).set_index("fault").round({"seconds": 1})


def confusion(rows: Iterable[Judged]) -> pandas.DataFrame:
    """Counts: a row for each kind that was planted, a column for each that was found."""
    counts = matrix(rows)
    kinds = [kind for kind in KINDS if any(kind in row for row in counts.values())]
    table = pandas.DataFrame(
        [[row.get(kind, 0) for kind in kinds] for row in counts.values()],
        index=pandas.Index(counts, name="planted"),
        columns=pandas.Index(kinds, name="found"),
    )
    return table


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
        batch = settings.get("batch", 1)
        size = f"{settings['layers']} layers, {batch} x {settings['tokens']} tokens"
        line = {"what": what, "step": f"{settings['preset']}, {settings['backend']}, {size}"}
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
    for name, mine in _by_name(rows, None).items():
        run = [row for row in mine if not row.skipped]
        if run:
            wrong = [row.label for row in run if row.missed]
            said = f"not so: {', '.join(wrong)}" if wrong else "found"
            lines.append(
                f"{'control' if mine[0].control else 'fault':8}{name}: {mine[0].due}, {said}"
            )
    return lines


def to_metrics(rows: Iterable[Judged]) -> list[dict]:
    """A row of metrics.csv for each trial: seconds from its start to its verdict."""
    return [
        {
            "operation": "selfcheck",
            "mode": "control" if row.control else "fault",
            "metric": "time_to_verdict",
            "unit": "s",
            "x_name": "round",
            "x_value": row.round,
            "median": None if row.skipped else row.seconds,
            "config": {
                "fault": row.name,
                "expected": row.due,
                "found": row.label,
                "right": row.right,
                "rule": row.rule,
                "rested_s": row.named_s,
                "skipped": row.skipped,
            },
        }
        for row in rows
    ]


def _short(text: str) -> str:
    """With the last two parts of each file's path: re/__init__.py."""
    return _PATH.sub(r"\1", text)


def _by_name(rows: Iterable[Judged], controls: bool | None) -> dict[str, list[Judged]]:
    found: dict[str, list[Judged]] = {}
    for row in rows:
        if controls is None or row.control == controls:
            found.setdefault(row.name, []).append(row)
    return found
