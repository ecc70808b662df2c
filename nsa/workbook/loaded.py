"""A stored run opened in any notebook: numbers as DataFrames, figures, plots drawn anew."""

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nsa.workbook import environment, metrics, parameters, record, store


@dataclass(frozen=True)
class LoadedRun:
    """One run's folder. Each part is read when it is asked for, so a damaged file spoils its own
    part alone: ValueError says which file, and what is wrong with it."""

    folder: Path

    @property
    def id(self) -> str:
        return self.folder.name

    @cached_property
    def record(self) -> dict[str, Any]:
        """The manifest: notebook, status, started, seconds and so on."""
        return self._json("record.json", {})

    @cached_property
    def status(self) -> str:
        """ok, failed, timeout, killed, interrupted, running or lost."""
        return record.status_now(self.record)

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """All of the notebook's parameters, as the run had them."""
        file = self.folder / "parameters.yaml"
        return parameters.read_file(file) if file.is_file() else {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, GPUs, commit."""
        return self._json("environment.json", {})

    @cached_property
    def metrics(self):
        """metrics.csv, a row a measured number, columns `nsa.workbook.metrics.COLUMNS`, then a
        column for each setting in which rows of one backend, metric and x differ."""
        from nsa.workbook.browse import with_settings

        return with_settings(self.stored_metrics)

    @cached_property
    def stored_metrics(self):
        """metrics.csv as it is, without columns for settings."""
        file = self.folder / "metrics.csv"
        try:
            return metrics.read(file)[list(metrics.COLUMNS)]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{file} is no table as a run writes it: {error}") from error

    @cached_property
    def verdicts(self):
        """A row a claim: verdict, claim, device, evidence."""
        import pandas

        columns = ["verdict", "claim", "device", "evidence"]
        return pandas.DataFrame(self._json("verdicts.json", []), columns=columns)

    @cached_property
    def verdict(self) -> str:
        """The worst of them."""
        return store.overall(self._json("verdicts.json", []))

    @property
    def figures(self) -> dict[str, Path]:
        """{name: its SVG, or what else there is}; a notebook displays one with IPython's SVG."""
        files = sorted((self.folder / "figures").glob("*.*"), key=lambda f: f.suffix == ".svg")
        return {file.stem: file for file in files}

    def explore(self):
        """The run's numbers to look through: what is measured, over what, of which setup."""
        from nsa.workbook.browse import explore

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
            facts = [" and ".join(self.stored_metrics["device"].unique())]
            facts.append(environment.provenance(self.environment)["commit"])
            verdict = f", {self.verdict}" if self.verdict else ""
        except ValueError as error:
            return f"<run {self.id}: damaged; {error}>"
        where = ", ".join(fact for fact in facts if fact)
        return f"<run {self.id}: {self.status}{verdict}; {where or 'no rows'}>"


def load(run: str | Path, root: str | Path | None = None) -> LoadedRun:
    """A stored run by its folder, its id, the beginning of it, or `latest`.

    root: where runs lie; by default the folder `runs` here or in a folder above, so a notebook
    finds those of its project. ValueError for what is no run, naming the nearest.
    """
    folder = Path(run).expanduser()
    if folder.is_dir() and not (folder / "record.json").is_file():
        raise ValueError(f"{run} is no run's folder, it has no record.json; `nsa runs` lists those")
    if folder.is_dir():
        return LoadedRun(folder)
    root = runs_root() if root is None else Path(root)
    name = str(run).strip("/")
    return LoadedRun(store.open_store(root).find(name.removeprefix(f"{root.name}/")))


def runs_root() -> Path:
    """The folder `runs` of the working folder, or of the nearest folder above it that has one."""
    here = Path(os.getcwd())
    found = (folder / "runs" for folder in (here, *here.parents))
    return next((folder for folder in found if folder.is_dir()), here / "runs")
