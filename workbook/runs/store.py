"""runs/ on disk: one folder a run, written once, and tables derived from the folders.

runs/<YYYY-MM-DD>/<notebook>-<id>/  notebook.ipynb parameters.yaml environment.json record.json
                                    metrics.csv verdicts.json witness.json figures/ trials/<id>/
"""

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.spelling import choice, nearest
from workbook.lab.progress import session
from workbook.runs import environment, looks, metrics
from workbook.runs.claim import VERDICTS, Claim
from workbook.runs.files import read_json, write_atomically, write_json
from workbook.runs.opening import open_run
from workbook.runs.parameters import of_kernel
from workbook.runs.record import load, status_now

LATEST = 5  # runs that an error names if none is similar


@dataclass(frozen=True)
class Machine:
    """Machine that runs a notebook's cells."""

    where: str  # "cpu" or "cuda"
    name: str  # its name in figures

    def __str__(self) -> str:
        import torch

        return f"{self.name}, torch {torch.__version__}"

    @property
    def on_cpu(self) -> bool:
        return self.where == "cpu"

    @property
    def threads(self) -> int | None:
        """Threads of each child: 1 on a CPU, where several run in parallel; None: torch's own."""
        return 1 if self.on_cpu else None

    @property
    def note(self) -> str:
        """Note on the machine for a figure of times."""
        return f"{self.name}: only ratios mean anything" if self.on_cpu else self.name


def find_machine(device: str, gpus: int = 1) -> Machine:
    """Machine for a notebook's parameter `device`; "auto" is a GPU if torch finds as many as
    `gpus`. Raises ValueError for another word, and for "cuda" without as many."""
    import torch

    choice("device", device, ("auto", "cpu", "cuda"))
    found = torch.cuda.device_count()
    if device == "cuda" and found < gpus:
        wanted, there = ("a GPU" if gpus == 1 else f"{gpus} GPUs"), found or "none"
        raise ValueError(
            f"device='cuda' needs {wanted} and torch {torch.__version__} finds {there}; "
            "device='cpu' would do, or 'auto', which takes what there is"
        )
    if device == "cpu" or found < gpus:
        return Machine("cpu", "a CPU")
    return Machine("cuda", torch.cuda.get_device_name())


class Run:
    """One run's folder, as used by its notebook: rows, verdicts, figures, trials, witnesses."""

    def __init__(self, folder: str | Path, notebook: str = "", parameters: dict | None = None):
        self.folder = Path(folder)
        self.notebook = notebook
        self.parameters = dict(parameters or {})
        self._device = ""  # for rows without a device, as `device` found it

    def __repr__(self) -> str:
        # without the folder: a committed notebook must not depend on where it ran
        return f"Run({self.notebook or self.id})"

    @property
    def id(self) -> str:
        """Folder's name, `<notebook>-<id>`; for a scratch run the notebook's alone."""
        return load(self.folder).get("run_id") or self.notebook or self.folder.name

    @property
    def environment(self) -> dict:
        """Snapshot stored with the run; taken now for a scratch run."""
        found = read_json(self.folder / "environment.json")
        if found is None:
            found = environment.snapshot(self.parameters.get("seed"))
            write_json(self.folder / "environment.json", found)
        return found

    def add_rows(self, rows: Any) -> None:
        """Append rows (mappings or a DataFrame) to metrics.csv.

        `config` may be a mapping, stored as JSON. torch, triton, commit and date are filled if
        missing, and `device`, on which it was measured: "cpu" and "cuda" become the names of those,
        and a row without one gets the device that `device` found. A failed measurement is also a
        row: no median, `outcome` in its config.
        ValueError names a column that does not exist, or one that a row lacks.
        """
        import pandas

        if hasattr(rows, "to_dict"):
            rows = rows.to_dict("records")
        rows = list(rows)
        if not rows:
            return
        facts = {**environment.provenance(self.environment), "date": environment.utc_now()}
        facts["device"], names = self._device, environment.devices()
        full = [metrics.row(row, facts) for row in rows]
        named = [row | {"device": names.get(row["device"], row["device"])} for row in full]
        added = metrics.table(named)
        before = self.metrics()
        table = pandas.concat([before, added], ignore_index=True) if len(before) else added
        write_atomically(self.folder / "metrics.csv", table.to_csv(index=False))

    def metrics(self):
        """Long table of the run, columns metrics.COLUMNS; empty if nothing was measured."""
        return metrics.read(self.folder / "metrics.csv")

    def devices(self) -> str:
        """Devices on which the rows so far were measured, in words."""
        return _devices(self.metrics())

    def verdict(self, claim: str, verdict: str, evidence: Any) -> str:
        """Store one claim's verdict, replacing an earlier one on the same claim; returns it.

        The devices on which the run's rows were measured are stored with it.
        """
        if verdict not in VERDICTS:
            raise ValueError(f"verdict {verdict!r} is not one of {', '.join(VERDICTS)}")
        entries = [entry for entry in self.verdicts() if entry["claim"] != claim]
        entry = {"claim": claim, "verdict": verdict, "evidence": evidence}
        entries.append(entry | {"device": self.devices()})
        write_json(self.folder / "verdicts.json", entries)
        return verdict

    def judge(self, claims: Iterable[Claim], *, must_hold: bool = True, shown: bool = True) -> None:
        """Record each claim's verdict and print it; then AssertionError if one is refuted.

        must_hold False: for predictions, whose refutation is a finding and ends nothing. shown
        False: the claims were printed before.
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
        """Write the figure as `name`.svg, with this run at its foot. A notebook displays it by
        itself, as PNG. None, from a plot that had nothing to draw, is left out."""
        if figure is not None:
            looks.write(figure, self._made("figures"), name, self.source())

    def source(self) -> str:
        """Text at a figure's foot: the run, devices and torch of its rows, commit, day. For a
        scratch run without anything that changes from one to the next."""
        stored, facts = load(self.folder), environment.provenance(self.environment)
        rows = self.metrics()
        told = [f"run {self.id}", _devices(rows), f"torch {_torch(rows, str(facts['torch']))}"]
        if stored:
            told += [f"commit {facts['commit']}"] if facts["commit"] else []
            told += [str(stored.get("started"))[:10]]
        return ", ".join(filter(None, told))

    def device(self, device: str, gpus: int = 1) -> Machine:
        """Machine that runs the cells, for a notebook's parameter `device`; see `find_machine`.
        Rows that are added later get this device, unless they have another."""
        machine = find_machine(device, gpus)
        self._device = "cpu" if machine.on_cpu else machine.name
        return machine

    def verdicts(self) -> list[dict]:
        return read_json(self.folder / "verdicts.json", [])

    def witness(self, record: Any) -> None:
        """Append one path witness (which implementation served which branch) to witness.json."""
        entries = read_json(self.folder / "witness.json", [])
        write_json(self.folder / "witness.json", [*entries, record])

    def figure(self, name: str) -> Path:
        """Path of a figure's file; its folder is created."""
        return self._made("figures") / name

    def trial_folder(self, trial: str | int) -> Path:
        """Folder of one trial, which is created."""
        return self._made("trials", str(trial))

    def _made(self, *parts: str) -> Path:
        folder = self.folder.joinpath(*parts)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _devices(rows) -> str:
    return " and ".join(rows["device"].unique())


def _torch(rows, here: str) -> str:
    """A run's own version of torch, or those of its rows where all were made by others."""
    of_rows = sorted({str(each) for each in rows["torch"].dropna() if each})
    others = all(each.split("+")[0] != here.split("+")[0] for each in of_rows)
    return " and ".join(of_rows) if of_rows and others else here


def current(parameters: dict | None = None, notebook: str = "") -> Run:
    """Run that this notebook belongs to; `parameters` are its kernel's globals(), which are
    checked, or a mapping of their values.

    `nsa run` passes its folder in NSA_RUN. In JupyterLab it is a run of its own, see
    `workbook.runs.opening`; under nbval a scratch folder, removed with the kernel. Its tables are
    shown with every text in full. ValueError for parameters that could not be run.
    """
    import pandas

    pandas.set_option("display.max_colwidth", None)
    given = dict(parameters or {})
    if "In" in given:
        given = of_kernel(given)
    folder = os.environ.get("NSA_RUN")
    if folder:
        if not Path(folder).is_dir():
            raise ValueError(f"NSA_RUN names {folder}, which is no folder; unset it or make it")
        return Run(folder, notebook, given)
    if found := session():
        return Run(open_run(found, given), notebook, given)
    scratch = tempfile.mkdtemp(prefix="nsa-scratch-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    return Run(scratch, notebook, given)


class Store:
    """All runs below one folder. Everything is read from the folders; there is no index file."""

    def __init__(self, root: str | Path):
        self.root = Path(root)

    def folders(self) -> list[Path]:
        """Run folders, oldest first."""
        found = [path.parent for path in self.root.glob("*/*/record.json")]
        return sorted(found, key=lambda folder: (str(load(folder).get("started")), folder))

    def runs(self):
        """Table with a row a run: run, notebook, status, verdict, started, seconds, stop_reason,
        torch, commit, device (all in its rows), folder. A `running` run whose runner is gone is
        shown as `lost`."""
        import pandas

        return pandas.DataFrame([summary(folder, self.root) for folder in self.folders()])

    def find(self, name: str | Path) -> Path:
        """Folder of a run, by path, id, a prefix of it, `<date>/<id>` or `latest`. ValueError if
        none or several match; it names the nearest."""
        if (Path(name) / "record.json").is_file():
            return Path(name)
        folders = self.folders()
        if not folders:
            raise ValueError(f"there are no runs in {self.root}; start one with `nsa run`")
        if str(name) == "latest":
            return folders[-1]
        name = str(name).strip("/")
        paths = [folder.relative_to(self.root).as_posix() for folder in folders]
        # the id alone, with the -2 of a second run, as in tables
        short = {path: re.search(r"[^-/]+(-\d{1,7})?$", path)[0] for path in paths}
        ways = {path: (path, path.split("/")[1], short[path]) for path in paths}
        fits = [path for path, (_, whole, _) in ways.items() if name in (path, whole)] or [
            path for path, names in ways.items() if any(n.startswith(name) for n in names)
        ]
        if len(fits) > 1:
            several = f"{len(fits)} runs: {', '.join(fits)}"
            raise ValueError(f"{name!r} fits {several}; give more of one")
        if not fits:
            known = [whole for _, whole, _ in ways.values()]
            hint = nearest(name, known)
            if len(known) > LATEST and hint.startswith("known"):
                hint = f"the latest are {', '.join(known[-LATEST:])}"
            raise ValueError(f"no run {name!r} in {self.root}; {hint}")
        return self.root / fits[0]


def summary(folder: Path, root: Path) -> dict:
    """Row of a run in the table of runs."""
    record = load(folder)
    facts = environment.provenance(read_json(folder / "environment.json", {}))
    return {
        "run": folder.relative_to(root).as_posix(),
        "notebook": record.get("notebook", ""),
        "status": status_now(record),
        "verdict": overall(read_json(folder / "verdicts.json", [])),
        **{key: record.get(key) for key in ("started", "seconds", "stop_reason")},
        **{key: facts[key] for key in ("torch", "commit")},
        "device": Run(folder).devices(),
        "folder": str(folder),
    }


def overall(verdicts: list[dict]) -> str:
    """Worst of a run's verdicts, or "" if it has none."""
    given = {entry.get("verdict") for entry in verdicts}
    return next((verdict for verdict in VERDICTS if verdict in given), "")
