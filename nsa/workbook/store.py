"""runs/ on disk: one folder a run, written once, and tables derived from the folders.

runs/<YYYY-MM-DD>/<notebook>-<id>/  notebook.ipynb parameters.yaml environment.json record.json
                                    metrics.csv verdicts.json witness.json figures/ trials/<id>/
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nsa.spelling import nearest
from nsa.workbook import environment, looks, metrics
from nsa.workbook.claim import Claim
from nsa.workbook.files import read_json, write_atomically, write_json
from nsa.workbook.machine import Machine, find_machine
from nsa.workbook.record import status_now

VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE")


class Run:
    """One run's folder, seen from its notebook: rows, verdicts, figures, trials, witnesses."""

    def __init__(self, folder: str | Path, notebook: str = "", parameters: dict | None = None):
        self.folder = Path(folder)
        self.notebook = notebook
        self.parameters = dict(parameters or {})

    def __repr__(self) -> str:
        # without the folder: a committed notebook must not depend on where it ran
        return f"Run({self.notebook or self.id})"

    @property
    def id(self) -> str:
        """The folder's name, `<notebook>-<id>`; for a scratch run the notebook's alone."""
        record = read_json(self.folder / "record.json", {})
        return record.get("run_id") or self.notebook or self.folder.name

    @property
    def environment(self) -> dict:
        """The snapshot stored with the run; taken now for a scratch run."""
        found = read_json(self.folder / "environment.json")
        if found is None:
            found = environment.snapshot(self.parameters.get("seed"))
            write_json(self.folder / "environment.json", found)
        return found

    def add_rows(self, rows: Any) -> None:
        """Append rows (mappings or a DataFrame) to metrics.csv.

        `config` may be a mapping, stored as JSON. gpu, torch, triton, commit and date are filled
        where missing. A measurement that failed is a row too: no median, `outcome` in its config.
        ValueError names a column that does not exist, or a row without operation or metric.
        """
        import pandas

        if hasattr(rows, "to_dict"):
            rows = rows.to_dict("records")
        rows = list(rows)
        if not rows:
            return
        facts = {**environment.provenance(self.environment), "date": environment.utc_now()}
        added = metrics.table([metrics.row(row, facts) for row in rows])
        before = self.metrics()
        table = pandas.concat([before, added], ignore_index=True) if len(before) else added
        write_atomically(self.folder / "metrics.csv", table.to_csv(index=False))

    def metrics(self):
        """The run's long table, columns metrics.COLUMNS; empty when nothing was measured."""
        return metrics.read(self.folder / "metrics.csv")

    def verdict(self, claim: str, verdict: str, evidence: Any) -> str:
        """Store one claim's verdict, replacing an earlier one on the same claim; returns it."""
        if verdict not in VERDICTS:
            raise ValueError(f"verdict {verdict!r} is not one of {', '.join(VERDICTS)}")
        entries = [entry for entry in self.verdicts() if entry["claim"] != claim]
        entries.append({"claim": claim, "verdict": verdict, "evidence": evidence})
        write_json(self.folder / "verdicts.json", entries)
        return verdict

    def judge(self, claims: Iterable[Claim], *, must_hold: bool = True, shown: bool = True) -> None:
        """Record each claim's verdict and print it; then AssertionError if one is refuted.

        must_hold False: for aims, which a run may miss without having failed. shown False: the
        claims were printed before.
        """
        claims = list(claims)
        for claim in claims:
            self.verdict(claim.claim, claim.verdict, claim.evidence)
            if shown:
                print(claim)
        refuted = [str(claim) for claim in claims if claim.verdict == "FAIL"]
        if refuted and must_hold:
            raise AssertionError("; ".join(refuted))

    def show(self, figure: Any, name: str) -> None:
        """Write the figure as `name`.png and `name`.svg, each naming this run inside.

        A notebook displays it by itself. None, a plot that had nothing to draw, is left out.
        """
        if figure is None:
            return
        label = {"Title": name, "Description": f"run {self.id}"}
        with looks.style():
            figure.savefig(self.figure(f"{name}.png"), dpi=120, metadata=label)
            figure.savefig(self.figure(f"{name}.svg"), metadata=label | {"Date": None})

    def device(self, device: str, gpus: int = 1) -> Machine:
        """What the cells run on, for a notebook's parameter `device`; see `find_machine`."""
        return find_machine(device, gpus)

    def verdicts(self) -> list[dict]:
        return read_json(self.folder / "verdicts.json", [])

    def witness(self, record: Any) -> None:
        """Append one path witness (which implementation served which branch) to witness.json."""
        entries = read_json(self.folder / "witness.json", [])
        write_json(self.folder / "witness.json", [*entries, record])

    def figure(self, name: str) -> Path:
        """The path of a figure's file, its folder made."""
        folder = self.folder / "figures"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def trial_folder(self, trial: str | int) -> Path:
        """The folder of one trial, made."""
        folder = self.folder / "trials" / str(trial)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def current(parameters: dict | None = None, notebook: str = "") -> Run:
    """The run this notebook belongs to.

    `nsa run` hands its folder in through NSA_RUN; in a live kernel or under nbval it is a scratch
    folder that goes when the kernel goes. Its tables are shown with every text whole.
    """
    import pandas

    pandas.set_option("display.max_colwidth", None)
    folder = os.environ.get("NSA_RUN")
    if folder:
        if not Path(folder).is_dir():
            raise ValueError(f"NSA_RUN names {folder}, which is no folder; unset it or make it")
        return Run(folder, notebook, parameters)
    scratch = tempfile.mkdtemp(prefix="nsa-scratch-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    return Run(scratch, notebook, parameters)


def create_folder(root: str | Path, name: str, day: str | None = None) -> Path:
    """A new folder `<root>/<day>/<name>`, or `<name>-2` and so on when that is taken.

    mkdir is exclusive, so of two that ask at once each gets its own. ValueError when the place
    cannot be written.
    """
    day = day or datetime.now(UTC).strftime("%Y-%m-%d")
    parent = Path(root, day)
    number = 1
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            folder = parent / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                number += 1
    except OSError as error:
        raise ValueError(
            f"cannot write runs to {root} ({error.strerror}); "
            "name a folder that can be written with --runs"
        ) from None


class Store:
    """All runs below one folder. Everything is read from the folders; there is no index file."""

    def __init__(self, root: str | Path):
        self.root = Path(root)

    def folders(self) -> list[Path]:
        """The run folders, oldest first."""
        found = [path.parent for path in self.root.glob("*/*/record.json")]
        return sorted(
            found, key=lambda f: (str(read_json(f / "record.json", {}).get("started")), f)
        )

    def runs(self):
        """One row a run: run, notebook, status, verdict, started, seconds, stop_reason, gpu, torch,
        commit, folder. A `running` run whose runner is gone shows as `lost`."""
        import pandas

        columns = ["run", "notebook", "status", "verdict", "started", "seconds", "stop_reason"]
        columns += ["gpu", "torch", "commit", "folder"]
        rows = [summary(folder, self.root) for folder in self.folders()]
        return pandas.DataFrame(rows, columns=columns)

    def find(self, name: str | Path) -> Path:
        """The folder of a run, by path, id, a prefix of it, `<date>/<id>` or `latest`.

        ValueError when none or several fit; it names the nearest.
        """
        if (Path(name) / "record.json").is_file():
            return Path(name)
        folders = self.folders()
        if not folders:
            raise ValueError(f"there are no runs in {self.root}; start one with `nsa run`")
        if str(name) == "latest":
            return folders[-1]
        name = str(name).strip("/")
        names = {f.relative_to(self.root).as_posix(): f for f in folders}
        exact = [f for key, f in names.items() if name in (key, key.split("/")[1])]
        if len(exact) == 1:
            return exact[0]
        # the short id alone is what tables show, so it must be enough
        parts = {key: (key, key.split("/")[1], _short_id(key)) for key in names}
        fits = exact or [
            names[k] for k, ways in parts.items() if any(w.startswith(name) for w in ways)
        ]
        if len(fits) == 1:
            return fits[0]
        if fits:
            several = ", ".join(f.relative_to(self.root).as_posix() for f in fits)
            raise ValueError(f"{name!r} fits {len(fits)} runs: {several}; give more of one")
        known = [ways[1] for ways in parts.values()]
        raise ValueError(f"no run {name!r} in {self.root}; {nearest(name, known, 0)}")

    def metrics(self):
        """Every run's metrics in one DataFrame, with the column `run` in front."""
        import pandas

        tables = []
        for folder in self.folders():
            table = metrics.read(folder / "metrics.csv")
            if len(table):
                table.insert(0, "run", folder.relative_to(self.root).as_posix())
                tables.append(table)
        return (
            pandas.concat(tables, ignore_index=True)
            if tables
            else pandas.DataFrame(columns=["run", *metrics.COLUMNS])
        )


def open_store(root: str | Path = "runs") -> Store:
    return Store(root)


def summary(folder: Path, root: Path) -> dict:
    """One run's line in the table of runs."""
    record = read_json(folder / "record.json", {})
    facts = environment.provenance(read_json(folder / "environment.json", {}))
    return {
        "run": folder.relative_to(root).as_posix(),
        "notebook": record.get("notebook", ""),
        "status": status_now(record),
        "verdict": overall(read_json(folder / "verdicts.json", [])),
        "started": record.get("started"),
        "seconds": record.get("seconds"),
        "stop_reason": record.get("stop_reason"),
        **{key: facts[key] for key in ("gpu", "torch", "commit")},
        "folder": str(folder),
    }


def overall(verdicts: list[dict]) -> str:
    """The worst of a run's verdicts, or "" when it has none."""
    given = {entry.get("verdict") for entry in verdicts}
    return next((v for v in ("FAIL", "INCONCLUSIVE", "PASS") if v in given), "")


def _short_id(key: str) -> str:
    """`2026-11-21/01_memory-1a2b3c4d-2` -> `1a2b3c4d-2`."""
    pieces = key.split("/")[1].split("-")
    return "-".join(pieces[-2:]) if pieces[-1].isdigit() and len(pieces[-1]) < 8 else pieces[-1]
