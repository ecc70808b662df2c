"""Stored runs, read in any notebook: numbers as DataFrames, claims with their trials, figures."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from workbook.runs import age, browse, environment, metrics, parameters, record, store
from workbook.runs.claim import Claim
from workbook.runs.files import read_json
from workbook.runs.live import Panel

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


class StoredRun:
    """A run's folder, for reading; `workbook.runs.store.Run` is for its notebook, which writes it.

    Each part is read on access, so a damaged file affects only its own part: a ValueError names the
    file and its fault. `given` replaces record.json, for a run that has not ended.
    """

    def __init__(self, folder: str | Path, given: dict[str, Any] | None = None):
        self.folder = Path(folder)
        if given is not None:
            self.record = given

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def notebook(self) -> str:
        return str(self.record.get("notebook") or self.folder.name.rpartition("-")[0])

    @cached_property
    def record(self) -> dict[str, Any]:
        """Manifest: notebook, status, started, seconds and so on."""
        return self._json("record.json", {})

    @cached_property
    def status(self) -> str:
        """Status: ok, failed, timeout, killed, interrupted, running or lost."""
        return record.status_now(self.record)

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """All parameters of the notebook, with the run's values."""
        file = self.folder / "parameters.yaml"
        return parameters.read_file(file) if file.is_file() else {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, GPUs, commit."""
        return self._json("environment.json", {})

    @property
    def _known(self) -> dict[str, Any]:
        """`environment`, empty if it is damaged."""
        return read_json(self.folder / "environment.json", {})

    @property
    def commit(self) -> str:
        """Commit of the source that ran, "" if unknown: NSA_COMMIT's if set, since git's own may be
        of another tree, over which that source was laid."""
        facts = self._known
        told = (facts.get("variables") or {}).get("NSA_COMMIT")
        return str(told or (facts.get("git") or {}).get("commit") or "")

    def age(self) -> age.Age:
        return age.since(self.commit)

    @property
    def labels(self) -> list[str]:
        """Caveats for readers of this evidence: lines of its notes.txt, and missing records."""
        notes = self.folder / "notes.txt"
        lines = notes.read_text(encoding="utf-8").splitlines() if notes.is_file() else []
        git = (self._known.get("git") or {}).get("commit")
        if not lines and git and git != self.commit:
            lines = [f"its rows name {git[:12]}, NSA_COMMIT {self.commit[:12]}"]
        lines += ["its commit is unknown"] * (not self.commit)
        lines += ["not marked as evidence"] * (not self.record.get("evidence"))
        lines += ["it has no rows"] * (not self.rows)
        return lines + ["it has no verdicts"] * (not self.sentences)

    @cached_property
    def metrics(self):
        """metrics.csv, a row a measured number, columns `workbook.runs.metrics.COLUMNS`, then a
        column for each setting in which rows of one backend, metric and x differ."""
        return metrics.with_settings(self.stored_metrics)

    @cached_property
    def stored_metrics(self):
        """metrics.csv as it is, without columns for settings."""
        file = self.folder / "metrics.csv"
        try:
            return metrics.read(file)[list(metrics.COLUMNS)]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{file} is no table as a run writes it: {error}") from error

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """metrics.csv, the config of each row as a mapping, `device` where it was measured."""
        table = self.stored_metrics
        rows = table.drop(columns="config").to_dict("records")
        return [r | {"config": c} for r, c in zip(rows, metrics.configs(table), strict=True)]

    @cached_property
    def device(self) -> str:
        """Devices on which its rows were measured, in words; "" without rows."""
        return " and ".join(sorted({*self.stored_metrics["device"]} - {""}))

    @property
    def table(self) -> str:
        """Path of its rows, below the runs' root."""
        return self.opens(self.folder / "metrics.csv")

    @cached_property
    def verdicts(self):
        """Table with a row a claim: verdict, claim, device, evidence."""
        import pandas

        columns = ["verdict", "claim", "device", "evidence"]
        return pandas.DataFrame(self._json("verdicts.json", []), columns=columns)

    @cached_property
    def verdict(self) -> str:
        """Worst of the verdicts."""
        return store.overall(self._json("verdicts.json", []))

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

    @property
    def figures(self) -> dict[str, Path]:
        """{name: its SVG, else another format}; a notebook displays one with IPython's SVG."""
        files = sorted((self.folder / "figures").glob("*.*"), key=lambda f: f.suffix == ".svg")
        return {file.stem: file for file in files}

    def opens(self, path: Path) -> str:
        """Path of a file or folder of the run, below the runs' root."""
        return path.relative_to(self.folder.parent.parent).as_posix()

    def explore(self):
        """Browse the run's numbers: the quantity, its x axis, and the setup."""
        return explore(self)

    def _json(self, name: str, missing: Any) -> Any:
        file = self.folder / name
        if not file.is_file():
            return missing
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is damaged, it is no JSON: {error}") from None

    def __repr__(self) -> str:
        try:
            facts = [self.device, environment.provenance(self.environment)["commit"]]
            verdict = f", {self.verdict}" if self.verdict else ""
        except ValueError as error:
            return f"<run {self.id}: damaged; {error}>"
        where = ", ".join(fact for fact in facts if fact)
        return f"<run {self.id}: {self.status}{verdict}; {where or 'no rows'}>"


def load(run: str | Path, root: str | Path | None = None) -> StoredRun:
    """Load a stored run by its folder, its id, a prefix of it, or `latest`.

    root: the folder of runs; by default `runs` here or in a folder above, so a notebook finds those
    of its project. ValueError if there is no such run, naming the nearest.
    """
    folder = Path(run).expanduser()
    if folder.is_dir() and not (folder / "record.json").is_file():
        raise ValueError(f"{run} is no run's folder, it has no record.json; `nsa runs` lists those")
    if folder.is_dir():
        return StoredRun(folder)
    root = runs_root() if root is None else Path(root)
    name = str(run).strip("/")
    return StoredRun(store.Store(root).find(name.removeprefix(f"{root.name}/")))


def runs_root() -> Path:
    """Folder `runs` of the working folder, or of the nearest folder above it that has one."""
    here = Path(os.getcwd())
    found = (folder / "runs" for folder in (here, *here.parents))
    return next((folder for folder in found if folder.is_dir()), here / "runs")


def explore(*runs: StoredRun | str | Path) -> Any:
    """Overlay the numbers of these runs of one notebook; without any, browse all runs below
    `runs_root()`, or say that there are none. Widgets where they can be moved, else pictures.
    ValueError for runs of several notebooks, or without a row."""
    return browser(*runs).show()


def browser(
    *runs: StoredRun | str | Path, root: str | Path | None = None, quantity: str = ""
) -> Panel:
    """Panel of `explore`; quantity: the one shown first."""
    opened = [run if isinstance(run, StoredRun) else load(run, root) for run in runs]
    notebooks = {run.notebook for run in opened}
    if len(notebooks) > 1:
        raise ValueError(
            f"runs of {' and '.join(sorted(notebooks))} measured different things; "
            "give runs of one notebook"
        )
    if opened:
        library = {next(iter(notebooks)): opened}
    else:
        root = runs_root() if root is None else Path(root)
        library = {}
        for folder in reversed(store.Store(root).folders()):
            run = StoredRun(folder)
            library.setdefault(str(run.record.get("notebook", "")), []).append(run)
    library = {name: list(filter(_has, library[name])) for name in sorted(library)}
    library = {name: runs for name, runs in library.items() if runs}
    if not library:
        what = ", ".join(run.id for run in opened) or f"runs below {root}"
        text = f"no rows to look through in {what}; a run that ended well has some"
        if opened:
            raise ValueError(text)
        return browse.nothing(text)
    return browse.panel(library, bool(opened), quantity)


def _has(run: StoredRun) -> bool:
    """True if the run has rows, which is faster than reading them."""
    try:
        with (run.folder / "metrics.csv").open("rb") as file:
            return bool(file.readline() and file.readline())
    except OSError:
        return False
