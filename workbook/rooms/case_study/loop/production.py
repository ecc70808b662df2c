"""Decide if the 12-layer loop at T 2048 needs checkpointing, as it was and with a right window.

    python -m workbook.rooms.case_study.loop.production [--device cpu] [--most-gib 14] [--small]

records the six cells of the report's memory table and the production pair, a process on each GPU at
once, and prints them with the decision as a JSON record. Cells that are predicted to hold more than
--most-gib are left out; the decision uses their prediction. --small is 2 layers at T 128.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whyhung.process import gpus
from workbook.lab import sweep
from workbook.rooms.case_study.figures import PEAKS_MIB
from workbook.rooms.case_study.loop.design import SEQUENTIAL, held, peak_mib, production
from workbook.runs import environment

ENTRY = "workbook.rooms.case_study.loop.measure:several"
CAPACITY_MIB = 79.6 * 1024  # of the A100 in the reports
RIGHT_WINDOW = tuple(name for name in SEQUENTIAL if name != "truncated_cache")
LOOPS = {"as it was": SEQUENTIAL, "with the right window": RIGHT_WINDOW}
DEADLINE_S = 580.0
LAYERS = 5  # of the report's memory table


def cells(layers: int, tokens: int, table: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """One cell a process: `measure`, its loop's name, and settings. Each loop's pair comes last."""
    found = [_cell("memory", "as it was", *size) for size in table if size != (layers, tokens)]
    for name in LOOPS:
        found += [_cell("memory", name, layers, tokens, checkpointing=on) for on in (False, True)]
    return [*found, _cell("gradients", "as it was", layers, tokens)]


def _cell(measure: str, loop: str, layers: int, tokens: int, **more: Any) -> dict[str, Any]:
    changes = {"layers": layers, "defects": list(LOOPS[loop])}
    settings = {"design": "production", "changes": changes, "tokens": tokens} | more
    return {"measure": measure, "loop": loop, "settings": settings}


def fits(cell: dict[str, Any], most_gib: float) -> bool:
    """Return True if the cell is predicted to hold at most that much."""
    settings = cell["settings"]
    design = production(settings["changes"]["layers"]).with_(defects=LOOPS[cell["loop"]])
    on = settings.get("checkpointing", False)
    return held(design, settings["tokens"], checkpointing=on).total <= most_gib * 2**30


def run(chosen: Sequence[dict[str, Any]], device: str, folder: str | Path) -> list[dict[str, Any]]:
    """Row of each cell: its loop, its result from workbook.rooms.case_study.loop.measure, and the
    report's figure if it has one; or the cell's status, if it failed."""
    lent = gpus.all_visible() if device == "cuda" else gpus.Gpus()

    def spec(cell: dict[str, Any], share_s: float) -> dict[str, Any]:
        return {"measure": cell["measure"], "settings": [cell["settings"] | {"device": device}]}

    ended = sweep.measure(
        ENTRY, chosen, spec, deadline_s=DEADLINE_S, gpus=lent, folder=folder, name=_name
    )
    rows = []
    for cell, one in zip(chosen, ended, strict=True):
        settings = cell["settings"]
        size = settings["changes"]["layers"], settings["tokens"]
        row = {"measure": cell["measure"], "loop": cell["loop"], "layers": size[0]}
        row |= {"tokens": size[1], "checkpointing": settings.get("checkpointing", False)}
        if cell["loop"] == "as it was" and not row["checkpointing"] and size in PEAKS_MIB:
            row["reported_mib"] = PEAKS_MIB[size]
        found = one.result["rows"][0] if one.result else {"status": one.status, "why": one.message}
        rows.append(row | found)
    return rows


def estimated_memory(
    tokens: Sequence[int], *, longest: int, device: str, folder: str | Path
) -> list[dict[str, Any]]:
    """Estimated memory of a step of the loop as it was, with LAYERS layers, one row a T:
    {"tokens", "mib", "how"}. Up to `longest` extrapolated from real steps of one and two layers, by
    their difference per layer; beyond, or where those failed, from its shapes."""
    near = [t for t in tokens if t <= longest]

    def spec(t: int, share_s: float) -> dict[str, Any]:
        two = [_cell("memory", "as it was", n, t)["settings"] | {"device": device} for n in (1, 2)]
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


def _name(cell: dict[str, Any]) -> str:
    settings = cell["settings"]
    told = (
        f"{cell['measure']} {cell['loop']}, {settings['changes']['layers']} x {settings['tokens']}"
    )
    return f"{told}, checkpointing" if settings.get("checkpointing") else told


def decide(rows: Sequence[dict[str, Any]], layers: int, tokens: int) -> list[str]:
    """One sentence a loop: whether it needs checkpointing, by recorded peaks if there are any, else
    by the prediction from its shapes."""
    said, limit = [], CAPACITY_MIB / 1024
    for name in LOOPS:
        (plain, how), (less, how_less) = (_gib(rows, name, layers, tokens, on) for on in (0, 1))
        needs = "needs" if plain > limit else "does not need"
        if less > limit:
            needs = "is too large even with"
        said.append(
            f"{layers} layers at T {tokens}, {name}: {plain:.1f} GiB ({how}) without "
            f"checkpointing, {less:.1f} GiB ({how_less}) with it; it {needs} checkpointing on "
            f"{limit:.1f} GiB"
        )
    return said


def _gib(rows: Any, loop: str, layers: int, tokens: int, checkpointing: bool) -> tuple[float, str]:
    """Peak of a loop, and whether it was recorded or predicted."""
    how, wanted = "predicted", ("memory", loop, layers, tokens, checkpointing)
    for row in rows:
        names = ("measure", "loop", "layers", "tokens", "checkpointing")
        if tuple(row[name] for name in names) == wanted:
            if "peak_mib" in row:
                return row["peak_mib"] / 1024, "recorded"
            if row.get("status") == "oom":
                how = "predicted; it ran out of memory here"
    design = production(layers).with_(defects=LOOPS[loop])
    return held(design, tokens, checkpointing=bool(checkpointing)).total / 2**30, how


def main() -> None:
    parser = argparse.ArgumentParser(prog=__spec__.name)
    parser.add_argument("--small", action="store_true", help="2 layers at T 128, on a CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cuda by default")
    text = "leaves out memory cells that hold more; all are run by default"
    parser.add_argument("--most-gib", type=float, default=float("inf"), metavar="GIB", help=text)
    parser.add_argument("--folder", default="production", help="of what each process wrote")
    given = parser.parse_args()
    layers, tokens, table, device = 12, 2048, list(PEAKS_MIB), given.device
    if given.small:
        layers, tokens, table, device = 2, 128, [(1, 128)], "cpu"
    started = time.monotonic()
    chosen = [c for c in cells(layers, tokens, table) if fits(c, given.most_gib)]
    rows = run(chosen, device, given.folder)
    record = {"environment": environment.snapshot(), "seconds": time.monotonic() - started}
    print(json.dumps(record | {"rows": rows, "decided": decide(rows, layers, tokens)}, indent=1))


if __name__ == "__main__":
    main()
