"""A cell of the benchmark: what is said about one implementation at one shape."""

from nsa.experiments.comparison.implementations import Implementation
from nsa.experiments.comparison.row_check import Checked
from nsa.lab.measure.shapes import Shape

NOT_COMPARED = "not compared: it computes another function"


def empty(shape: Shape, implementation: Implementation) -> dict:
    """A cell that nobody has filled yet."""
    return {
        "shape": shape.to_dict(),
        "name": implementation.name,
        "operation": implementation.operation,
        "outcome": "",
        "message": implementation.other,
        "checked": "",
        **{name: {} for name in ("errors", "latency_ms", "memory_mib", "paths")},
    }


def fail(cell: dict, outcome: str, text: str) -> None:
    """How it ended; no speed, memory or passed check stands beside that."""
    for name in ("latency_ms", "memory_mib", "errors"):
        cell[name].clear()
    cell["checked"] = ""
    if outcome == "red":
        cell |= {"outcome": outcome, "message": text}
    else:
        cell["outcome"] = outcome
        add(cell, text)


def note(cell: dict, checked: Checked) -> None:
    """Keeps the errors of the check at the longer T, which comes last."""
    cell["errors"] = {"forward": [checked.forward.worst, checked.forward.limit]}
    if checked.backward is not None:
        cell["errors"]["backward"] = [checked.backward.worst, checked.backward.limit]


def add(cell: dict, text: str) -> None:
    """One more remark in a cell's message."""
    cell["message"] = "; ".join(filter(None, (cell["message"], text)))


def brief(error: BaseException) -> str:
    """Its kind and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
