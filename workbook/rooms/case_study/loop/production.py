"""Memory of the case study's five layers, extrapolated from real steps of one and two."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbook.lab import sweep
from workbook.rooms.case_study.loop.design import SEQUENTIAL, peak_mib

ENTRY = "workbook.rooms.case_study.loop.measure:several"
DEADLINE_S = 580.0
LAYERS = 5  # of the report's memory table


def estimated_memory(
    tokens: Sequence[int], *, longest: int, device: str, folder: str | Path
) -> list[dict[str, Any]]:
    """Estimated memory of a step of the loop as it was, with LAYERS layers, one row a T:
    {"tokens", "mib", "how"}. Up to `longest` extrapolated from real steps of one and two layers, by
    their difference per layer; beyond, or where those failed, from its shapes."""
    near = [t for t in tokens if t <= longest]

    def spec(t: int, share_s: float) -> dict[str, Any]:
        common = {"design": "production", "tokens": t, "device": device}
        two = [common | {"changes": {"layers": n, "defects": [*SEQUENTIAL]}} for n in (1, 2)]
        return {"measure": "memory", "settings": two}

    ended = sweep.measure(
        ENTRY, near, spec, deadline_s=DEADLINE_S, folder=folder, name="loop at T {}".format
    )
    rows = {t: {"mib": peak_mib(LAYERS, t), "how": "from shapes"} for t in tokens}
    for t, one in zip(near, ended, strict=True):
        if one.result:
            first, second = (row["peak_mib"] for row in one.result["rows"])
            mib = first + (LAYERS - 1) * (second - first)
            rows[t] = {"mib": mib, "how": "from real steps of 1 and 2 layers"}
    return [{"tokens": t} | row for t, row in rows.items()]
