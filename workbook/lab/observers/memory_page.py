"""Attribution of a step's memory, as plain values and as a text page."""

from functools import partial
from typing import Any

from workbook.lab.measure.allocations import CATEGORIES
from workbook.lab.measure.attribution import ENOUGH, Attribution
from workbook.lab.measure.owners import BEFORE
from workbook.lab.measure.recorders import MIB
from workbook.lab.observers.trace import columns

SHOWN, LEAST = 15, 0.001  # rows of the table that are printed, at most, and their least share


def told(found: Attribution) -> dict[str, Any]:
    """Plain values of an attribution, in MiB: the peak and its phase, changes by the backward per
    category, statistics by torch's names, and the table with the share that it explains."""
    rows = found.rows()
    named = [row for row in rows if is_told(row)]
    lives, at = found.lives, {"peak": found.at}
    if around := found.around("backward"):
        at |= {"before_backward": around[0], "after_backward": around[1]}
    held = {
        name: {category: size / MIB for category, size in lives.held(event).items()}
        for name, event in at.items()
    }
    if around:
        before, after = held["before_backward"], held["after_backward"]
        held["difference"] = {name: after[name] - before[name] for name in CATEGORIES}
    return {
        "peak_mib": found.peak / MIB,
        "phase": found.phase,
        "held_mib": held,
        "statistics": {name: found.statistics(event) for name, event in at.items()},
        "explained": sum(row["mib"] for row in named) * MIB / found.peak,
        "missing": [
            {"why": _why(row), "mib": row["mib"], "share": row["share"]}
            for row in rows
            if not is_told(row)
        ],
        "table": rows,
    }


def is_told(row: dict[str, Any]) -> bool:
    """True if the row has the line that allocated it, or was there before and has a module."""
    return bool(row["line"] or (row["phase"] == BEFORE and row["module"]))


def _why(row: dict[str, Any]) -> str:
    if row["phase"] == BEFORE:
        return "there before the step, in no tensor that a name of Python's leads to"
    by = f"by {row['operator']}" if row["operator"] else "by nothing that torch's profiler names"
    return f"allocated {_in(row['phase'])} {by}, with no line of Python's around it"


def _in(phase: str) -> str:
    return phase if phase.startswith("after") else f"in the {phase}"


def text(record: dict[str, Any]) -> str:
    """Format the record as a text page."""
    held, peak = record["held_mib"], record["peak_mib"]
    size = partial(_size, unit="GiB" if peak >= 2048 else "MiB")
    lines = [
        f"memory of step {record['step']} (counted from 0) on {record['device']}, rank "
        f"{record['rank']}: {size(peak)} at the peak, {_in(record['phase'])}"
    ]
    if record["device"] == "cpu":
        lines.append(
            "counted from the allocator's events: torch has no statistics, summary or snapshot "
            "file of a CPU"
        )
    names = [name for name in CATEGORIES if any(held[at].get(name) for at in held)]
    every = ("before_backward", "after_backward", "difference", "peak")
    sums = {at: held[at] | {"all": sum(held[at].values())} for at in every if at in held}
    table = [
        {"category": name.replace("_", " ")}
        | {at.replace("_", " "): size(by[name], at == "difference") for at, by in sums.items()}
        for name in (*names, "all")
    ]
    lines += ["", *columns(table, {}, left=("category",))]
    share, aim = record["explained"], f"{ENOUGH:.0%}"
    lines += ["", f"{share:.1%} of the peak is attributed to modules and lines (aim: {aim})"]
    shown = [
        {"held": size(row["mib"]), "share": f"{row['share']:.1%}", "category": row["category"]}
        | {"allocated in": row["phase"], "module": row["module"] or "-"}
        | {"line": row["line"] or (row["operator"] and f"[{row['operator']}]") or "-"}
        for row in record["table"][:SHOWN]
        if row["share"] >= LEAST
    ]
    lines += columns(shown, {}, left=("category", "allocated in", "module", "line"))
    if more := len(record["table"]) - len(shown):
        rest = sum(row["mib"] for row in record["table"][len(shown) :])
        lines.append(f"  and {more} more rows with {size(rest)}")
    if share < ENOUGH:
        lines += ["", "what is missing:"]
        lines += [f"  {size(row['mib'])} {row['why']}" for row in record["missing"][:SHOWN]]
    if (note := record.get("cross_check", {}).get("note")) or record["notes"]:
        lines += ["", *filter(None, [note, *record["notes"]])]
    return "\n".join(lines)


def _size(mib: float, signed: bool = False, unit: str = "MiB") -> str:
    value = mib / 1024 if unit == "GiB" else mib
    return f"{value:{'+' if signed else ''}.2f} {unit}"
