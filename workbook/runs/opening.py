"""Creation of a run's folder: by `nsa run`, by a batch, or by Run All in JupyterLab."""

import atexit
import hashlib
import itertools
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbook.runs import environment, identity, record
from workbook.runs.files import write_atomically, write_json
from workbook.runs.record import Record

SESSION = "session"  # in record.json: the open notebook, without its path
_live: list["_Live"] = []  # at most one: the run of this kernel that has not ended


@dataclass(frozen=True)
class Planned:
    """A run with checked input, before anything is written; `name` is its folder's, `source` the
    hash of the code that runs."""

    notebook: Path
    given: dict[str, Any]
    full: dict[str, Any]
    environment: dict[str, Any]
    name: str
    source: str


def create_folder(root: str | Path, name: str, day: str | None = None) -> Path:
    """Create a folder `<root>/<day>/<name>`, or `<name>-2` and so on if that is taken.

    mkdir is exclusive, so concurrent callers get different folders. ValueError if the place cannot
    be written.
    """
    folder = Path(root, day or datetime.now(UTC).strftime("%Y-%m-%d"), name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(2):
            try:
                folder.mkdir()
                return folder
            except FileExistsError:
                folder = folder.with_name(f"{name}-{number}")
    except OSError as error:
        raise ValueError(
            f"cannot write runs to {root} ({error.strerror}); "
            "name a folder that can be written with --runs"
        ) from None


def open_folder(root: str | Path, planned: Planned, **facts: Any) -> tuple[Path, Record]:
    """Create the folder of a run, with its parameters and environment, and its record, which has
    begun and contains these facts too."""
    import yaml

    folder = create_folder(root, planned.name)
    settings = yaml.safe_dump(planned.full, sort_keys=False, allow_unicode=True)
    write_atomically(folder / "parameters.yaml", settings)
    write_json(folder / "environment.json", planned.environment)
    question = identity.question(planned.notebook)
    return folder, Record(folder, planned.notebook.stem, question, source=planned.source, **facts)


def open_run(notebook: Path, values: dict[str, Any]) -> Path:
    """Create the folder of a new run of the notebook that is open in this kernel; an earlier run
    that has not ended is closed as interrupted."""
    from IPython import get_ipython

    _end("the notebook was run again before its last cell")
    facts = environment.snapshot(values.get("seed"))
    source = identity.source(notebook)
    name = f"{notebook.stem}-{identity.run_id(notebook, values, facts, source)}"
    planned = Planned(notebook, values, values, facts, name, source)
    folder, kept = open_folder(runs_of(notebook), planned, **{SESSION: named(notebook)})
    code = [cell for cell in identity.read_cells(notebook) if cell.get("cell_type") == "code"]
    live = _Live(kept, get_ipython(), code[-1])
    _live[:] = [live]
    live.shell.events.register("post_run_cell", live.ran)
    return folder


def runs_of(notebook: Path) -> Path:
    """Folder for runs of an open notebook: runs/ beside notebooks/, or beside the notebook."""
    folder = notebook.resolve().parent
    return (folder.parent if folder.name == "notebooks" else folder) / "runs"


class _Live:
    """Run of this kernel, ended by its last cell or by one that fails."""

    def __init__(self, kept: record.Record, shell: Any, last: dict):
        self.kept, self.shell, self.last = kept, shell, last

    def ran(self, result: Any) -> None:
        """Callback after a cell, with IPython's ExecutionResult."""
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            interrupted = isinstance(error, KeyboardInterrupt)
            message = (
                "the run was interrupted" if interrupted else f"{type(error).__name__}: {error}"
            )
            self.close("interrupted" if interrupted else "error", message)
        elif self._is_last(result.info):
            self.close("ok")

    def _is_last(self, info: Any) -> bool:
        source = "".join(self.last["source"]).strip()
        return self.last.get("id") == (info.cell_id or "") or info.raw_cell.strip() == source

    def close(self, reason: str, message: str = "") -> None:
        self.shell.events.unregister("post_run_cell", self.ran)
        _live.remove(self)
        self.kept.close(reason, message)


@atexit.register
def _end(why: str = "the kernel ended before the last cell") -> None:
    for live in list(_live):
        live.close("interrupted", why)


def named(notebook: Path) -> str:
    return hashlib.sha256(str(notebook.resolve()).encode()).hexdigest()[:12]
