"""Claims and rows of stored runs, with the trials, commit and caveats of each."""

import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from workbook.runs import age, metrics, parameters, store
from workbook.runs.claim import UNDECIDED, VERDICTS, Claim
from workbook.runs.files import read_json, tracked_files
from workbook.runs.record import load, status_now

TRIAL = re.compile(r"\b[0-9a-f]{12}(?:-\d+)?\b")  # an id as `nsa explain` accepts it


@dataclass(frozen=True)
class Sentence(Claim):
    """A claim of a stored run, the line of verdicts.json where it begins, and its trials there."""

    folder: Path
    line: int
    trials: tuple[Path, ...] = ()

    @property
    def key(self) -> str:
        """Subject of the claim, without the finding: the text before a colon or semicolon."""
        return re.split("[:;] ", self.claim)[0]

    @property
    def where(self) -> str:
        """Line of verdicts.json where it begins, below the runs' root."""
        return f"{self.folder.parent.name}/{self.folder.name}/verdicts.json#L{self.line}"


@dataclass(frozen=True)
class StoredRun:
    """A run that ended, read from its folder."""

    folder: Path
    record: dict[str, Any]

    @property
    def notebook(self) -> str:
        return str(self.record.get("notebook") or self.folder.name.rpartition("-")[0])

    def opens(self, path: Path) -> str:
        """Path of a file or folder of the run, below the runs' root."""
        return path.relative_to(self.folder.parent.parent).as_posix()

    @cached_property
    def device(self) -> str:
        """Devices on which its rows were measured, in words; "" without rows."""
        return " and ".join(sorted({row["device"] for row in self.rows} - {""}))

    @cached_property
    def environment(self) -> dict[str, Any]:
        return read_json(self.folder / "environment.json", {})

    @property
    def commit(self) -> str:
        """Commit of the source that ran, "" if unknown: NSA_COMMIT's if set, since git's own may be
        of another tree, over which that source was laid."""
        told = (self.environment.get("variables") or {}).get("NSA_COMMIT")
        return str(told or (self.environment.get("git") or {}).get("commit") or "")

    def age(self, at: str = "HEAD") -> age.Age:
        return age.since(self.commit, at)

    @property
    def labels(self) -> list[str]:
        """Caveats for readers of this evidence: lines of its notes.txt, and missing records."""
        notes = self.folder / "notes.txt"
        lines = notes.read_text(encoding="utf-8").splitlines() if notes.is_file() else []
        git = (self.environment.get("git") or {}).get("commit")
        if not lines and git and git != self.commit:
            lines = [f"its rows name {git[:12]}, NSA_COMMIT {self.commit[:12]}"]
        lines += ["its commit is unknown"] * (not self.commit)
        lines += ["not marked as evidence"] * (not self.record.get("evidence"))
        lines += ["it has no rows"] * (not self.rows)
        return lines + ["it has no verdicts"] * (not self.sentences)

    @property
    def metrics(self) -> str:
        """Path of its rows, below the runs' root."""
        return self.opens(self.folder / "metrics.csv")

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """metrics.csv, the config of each row as a mapping, `device` where it was measured."""
        table = metrics.read(self.folder / "metrics.csv")
        rows = table.drop(columns="config").to_dict("records")
        return [r | {"config": c} for r, c in zip(rows, metrics.configs(table), strict=True)]

    @cached_property
    def parameters(self) -> dict[str, Any]:
        file = self.folder / "parameters.yaml"
        return parameters.read_file(file) if file.is_file() else {}

    @cached_property
    def sentences(self) -> list[Sentence]:
        """Claims of the run, in order."""
        file = self.folder / "verdicts.json"
        entries = read_json(file, [])
        text = file.read_text(encoding="utf-8") if entries else ""
        begins = [n for n, line in enumerate(text.splitlines(), 1) if line == "  {"]
        if len(begins) != len(entries):
            raise ValueError(f"{file} is not as a run writes it, one claim after the other")
        return [
            Sentence(
                entry["claim"],
                entry["verdict"],
                entry["evidence"],
                self.folder,
                line,
                tuple(self._trials(json.dumps(entry))),
            )
            for entry, line in zip(entries, begins, strict=True)
        ]

    def _trials(self, text: str) -> Iterator[Path]:
        """Folders of the trials that a text names, if the run contains them."""
        for id in dict.fromkeys(TRIAL.findall(text)):
            if (self.folder / "trials" / id).is_dir():
                yield self.folder / "trials" / id


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
    return Stored(store.open_store(root).folders())


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
