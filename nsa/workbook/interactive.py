"""Run All in JupyterLab makes a run of its own, and leaves a committed notebook as it is.

In the kernel `open_run` makes the run's folder and ends its record when the last cell has run. In
the server, whose extension this module is, the executed notebook is written into that folder each
time that JupyterLab saves it; of a notebook in git the file itself keeps its stored outputs.
"""

import atexit
import hashlib
import subprocess
import threading
from pathlib import Path
from typing import Any

from nsa.workbook import environment, identity, record, report
from nsa.workbook.files import write_notebook
from nsa.workbook.run import Planned, open_folder

SESSION = "session"  # in record.json: which notebook is open, without its path
_live: list["_Live"] = []  # at most one: the run of this kernel that is not over


def open_run(notebook: Path, values: dict[str, Any]) -> Path:
    """The folder of a new run of the notebook that is open in this kernel; one before it that is
    not over is ended as interrupted."""
    from IPython import get_ipython

    _end("the notebook was run again before its last cell")
    facts = environment.snapshot(values.get("seed"))
    source = identity.source(notebook)
    name = f"{notebook.stem}-{identity.run_id(notebook, values, facts, source)}"
    planned = Planned(notebook, values, values, facts, name, source)
    folder, kept = open_folder(runs_of(notebook), planned, **{SESSION: _named(notebook)})
    code = [cell for cell in identity.read_cells(notebook) if cell.get("cell_type") == "code"]
    live = _Live(kept, get_ipython(), code[-1])
    _live[:] = [live]
    live.shell.events.register("post_run_cell", live.ran)
    return folder


def runs_of(notebook: Path) -> Path:
    """Where runs of a notebook that is open go: runs/ beside notebooks/, or beside it."""
    folder = notebook.resolve().parent
    return (folder.parent if folder.name == "notebooks" else folder) / "runs"


class _Live:
    """The run of this kernel, ended by its last cell or by one that fails."""

    def __init__(self, kept: record.Record, shell: Any, last: dict):
        self.kept, self.shell, self.last = kept, shell, last

    def ran(self, result: Any) -> None:
        """After a cell: IPython's ExecutionResult."""
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


def _named(notebook: Path) -> str:
    return hashlib.sha256(str(notebook.resolve()).encode()).hexdigest()[:12]


def _load_jupyter_server_extension(server: Any) -> None:
    server.contents_manager.register_pre_save_hook(keep_outputs_in_the_run)


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def keep_outputs_in_the_run(model: dict, path: str, contents_manager: Any, **_: Any) -> None:
    """Jupyter's hook before it saves: the notebook as it is goes into the run that its kernel has
    made, and what is saved of a notebook in git has the stored outputs. Others are left alone."""
    import nbformat

    if model.get("type") != "notebook":
        return
    file = Path(contents_manager.root_dir, path)
    folder = _run_of(file)
    if folder is None:
        return
    shown = nbformat.from_dict(model["content"])
    write_notebook(folder / "notebook.ipynb", shown)
    if record.load(folder)["status"] != "running":
        threading.Thread(target=_report, args=(folder,), daemon=True).start()
    if _in_git(file):
        model["content"] = _with_outputs_of(nbformat.read(file, as_version=4), shown)


def _run_of(file: Path) -> Path | None:
    """The newest run that a kernel which is alive has made of the notebook."""
    found = []
    for manifest in runs_of(file).glob(f"*/{file.stem}-*/record.json"):
        kept = record.load(manifest.parent)
        if kept.get(SESSION) == _named(file):
            found.append((str(kept["started"]), manifest.stat().st_mtime_ns, manifest.parent, kept))
    if not found:
        return None
    *_, folder, kept = max(found)
    return folder if record.process_start(kept["pid"]) == kept["pid_started"] else None


def _in_git(file: Path) -> bool:
    command = ["git", "-C", str(file.parent), "ls-files", "--error-unmatch", file.name]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def _with_outputs_of(stored: Any, shown: Any) -> Any:
    """What is shown, with the outputs that are stored; where no cell was edited, what is stored."""

    def sources(notebook: Any) -> list:
        return [(c.cell_type, c.source, c.metadata.get("tags", [])) for c in notebook.cells]

    if sources(stored) == sources(shown):
        return stored
    before = {cell.get("id"): cell for cell in stored.cells if cell.cell_type == "code"}
    for cell in shown.cells:
        if cell.cell_type == "code":
            old = before.get(cell.get("id"), {})
            cell.outputs = old.get("outputs", [])
            cell.execution_count = old.get("execution_count")
            cell.metadata = old.get("metadata", cell.metadata)
    shown.metadata = stored.metadata
    return shown


def _report(folder: Path) -> None:
    report.render(folder)
    report.index(folder.parent.parent)
