"""How well a calibration predicts cells that took no part in it: what the deadlines rest on.

    python -m nsa.lab.search.accuracy [--device cuda] [--folder DIR] [--cells late]

The rule was fixed before anything ran: each of ten cells is predicted from its own calibration,
steps of one and two layers at three shorter lengths, and then run; the aim is a prediction within
AIM of what it took, and no cell may be ended before 3 x its prediction. The last third of the
cells was chosen after the first seven had been seen.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Any

from nsa.lab.search.execute import Done, Trials
from nsa.lab.search.ledger import Ledger
from nsa.lab.search.plan import Plan
from whyhung.process.deadlines import SOFT

AIM = 0.25
STEPS = 8
CELLS: dict[str, dict[str, dict[str, Any]]] = {
    "first": {
        "4 layers, T 512": {"layers": 4, "tokens": 512, "backend": "gather"},
        "dense masks": {"layers": 6, "tokens": 256, "backend": "masked"},
        "checkpointing": {"layers": 8, "tokens": 256, "backend": "gather", "checkpoint": "all"},
        "T 1024": {"layers": 3, "tokens": 1024, "backend": "gather"},
        "batch 4": {"layers": 4, "tokens": 256, "backend": "masked", "batch": 4},
        "no power of 2": {"layers": 6, "tokens": 384, "backend": "sdpa"},
        "12 layers": {"layers": 12, "tokens": 128, "backend": "gather"},
    },
    "late": {
        "one token at a time": {"layers": 3, "tokens": 128, "backend": "sequential"},
        "half checkpointed": {"layers": 6, "tokens": 256, "backend": "gather", "checkpoint": "0:3"},
        "T 2048": {"layers": 1, "tokens": 2048, "backend": "sdpa"},
    },
}


def foretold(
    cells: Mapping[str, Mapping[str, Any]], ledger: Ledger, settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """`row` of each cell, which is calibrated and run, one after another."""
    found = []
    for name, cell in cells.items():
        plan = Plan({}, settings={**settings, **cell}, steps=STEPS, calibrate=True, oracles=[])
        found.append(row(name, cell, Trials(plan, ledger).run({})))
    return found


def row(name: str, cell: Mapping[str, Any], done: Done) -> dict[str, Any]:
    """cell, settings, verdict, predicted_s, took_s, and the ratio of what it took to that.

    took_s: of its steps, as deadlines count. early: it was ended before 3 x its prediction.
    """
    evidence = done.evidence
    predicted_s, ended = evidence.predicted_s, evidence.end
    last = max((s.t for s in evidence.samples), default=0.0)
    took_s = last - (evidence.began_s or 0.0)
    stopped = ended is not None and ended.how == "stopped by the supervisor"
    ratio = took_s / predicted_s if predicted_s and not stopped else None
    return {
        "cell": name,
        **{"settings": dict(cell), "verdict": done.verdict.label},
        **{"predicted_s": predicted_s, "took_s": took_s, "ratio": ratio},
        "early": stopped and predicted_s is not None and took_s < SOFT * predicted_s,
    }


def judged(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """{"within": cells within AIM, "of", "worst": the ratio furthest from 1, "early": how many}."""
    rows = list(rows)
    ratios = [r["ratio"] for r in rows if r["ratio"]]
    return {
        "within": sum(abs(ratio - 1) <= AIM for ratio in ratios),
        "of": len(rows),
        "worst": max(ratios, key=lambda ratio: max(ratio, 1 / ratio), default=None),
        "early": sum(r["early"] for r in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog=__spec__.name)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", default="trials", help="of the trials")
    parser.add_argument("--cells", choices=("all", *CELLS), default="all")
    given = parser.parse_args()
    named = CELLS if given.cells == "all" else {given.cells: CELLS[given.cells]}
    cells = {name: cell for part in named.values() for name, cell in part.items()}
    settings = {"device": given.device} | ({"threads": 1} if given.device == "cpu" else {})
    rows = foretold(cells, Ledger(given.folder), settings)
    print(json.dumps({"rows": rows, "judged": judged(rows)}, indent=1))


if __name__ == "__main__":
    main()
