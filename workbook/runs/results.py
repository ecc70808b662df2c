"""Claims and rows of the runs that ended, the newest that decide."""

import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from workbook.runs import store
from workbook.runs.claim import UNDECIDED, VERDICTS
from workbook.runs.files import read_json, tracked_files
from workbook.runs.loaded import Sentence, StoredRun
from workbook.runs.record import load, status_now


class Stored:
    """Runs that ended, newest first: reached their end, or were ended by a claim that failed.

    live: a run that has not ended, which counts as the newest.
    """

    def __init__(self, folders: Iterable[Path], live: store.Run | None = None):
        found = [StoredRun(folder, load(folder)) for folder in folders]
        found.sort(key=lambda run: str(run.record.get("started")), reverse=True)
        self.runs = [
            r for r in found if status_now(r.record) == "ok" or _refuted(r.folder, r.record)
        ]
        if live is not None:
            self.runs.insert(0, StoredRun(live.folder, {"notebook": live.notebook}))

    def of(self, notebook: str) -> list[StoredRun]:
        """Runs of a notebook, by the number it begins with."""
        return [run for run in self.runs if run.notebook.startswith(notebook)]

    def sentence(
        self, notebook: str, pattern: str, among: Callable[[StoredRun], bool] = lambda run: True
    ) -> Sentence | None:
        """Worst of the devices' newest decided matches of `pattern`; else the newest; else None.

        A newer run on another device does not override what one device refutes.
        """
        found: list[Sentence] = []
        decided: dict[str, Sentence] = {}
        for run in filter(among, self.of(notebook)):
            mine = [s for s in run.sentences if re.match(pattern, s.claim)]
            found += mine
            for one in mine:
                if one.verdict not in UNDECIDED:
                    decided.setdefault(run.device, one)
        worst = sorted(decided.values(), key=lambda one: VERDICTS.index(one.verdict))
        return next(iter([*worst, *found]), None)

    def rows(
        self, notebook: str, wanted: Callable[[dict[str, Any]], bool], **columns: Any
    ) -> tuple[StoredRun, list[dict[str, Any]]] | None:
        """Rows with these columns that are `wanted`, of the newest run that has any; the median of
        a value that was not measured is NaN, and its config has the outcome."""
        for run in self.of(notebook):
            same = (r for r in run.rows if all(r[name] == v for name, v in columns.items()))
            if found := [row for row in same if wanted(row)]:
                return run, found
        return None


def open_stored(root: str | Path = "runs") -> Stored:
    """Open the runs below `root`."""
    return Stored(store.Store(root).folders())


def committed(root: str | Path = "runs") -> list[Path]:
    """Run folders below `root` that git tracks. ValueError if there is no checkout."""
    try:
        listed = tracked_files(root, "*/record.json")
    except (OSError, subprocess.CalledProcessError):
        raise ValueError(
            f"{root} lies in no git checkout, so nothing of it is committed; "
            "without --committed all runs below it are taken"
        ) from None
    return [Path(root, name).parent for name in listed]


def _refuted(folder: Path, record: dict[str, Any]) -> bool:
    """True if a failed claim ended the run, which is a finding and no accident."""
    failed = record.get("stop_reason") == "error" and "AssertionError" in record.get("message", "")
    return failed and store.overall(read_json(folder / "verdicts.json", [])) == "FAIL"
