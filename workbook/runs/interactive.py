"""Make Run All in JupyterLab a run of its own, and keep a committed notebook as it is.

In the kernel `opening.open_run` makes the run's folder, and ends its record when the last cell has
run. In the server, whose extension this module is, the executed notebook is written into that
folder each time that JupyterLab saves it; the file of a notebook in git keeps its stored outputs.
"""

import subprocess
import threading
from pathlib import Path
from typing import Any

from workbook.runs import record, report
from workbook.runs.files import tracked_files, write_notebook
from workbook.runs.opening import SESSION, named, runs_of


def _load_jupyter_server_extension(server: Any) -> None:
    server.contents_manager.register_pre_save_hook(keep_outputs_in_the_run)


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def keep_outputs_in_the_run(model: dict, path: str, contents_manager: Any, **_: Any) -> None:
    """Jupyter's pre-save hook: write the notebook into its kernel's run, and restore the stored
    outputs in the file of a notebook in git. Other notebooks are not changed."""
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
    """Newest run of the notebook that belongs to a live kernel."""
    found = []
    for manifest in runs_of(file).glob(f"*/{file.stem}-*/record.json"):
        kept = record.load(manifest.parent)
        if kept.get(SESSION) == named(file):
            found.append((str(kept["started"]), manifest.stat().st_mtime_ns, manifest.parent, kept))
    if not found:
        return None
    *_, folder, kept = max(found)
    return folder if record.process_start(kept["pid"]) == kept["pid_started"] else None


def _in_git(file: Path) -> bool:
    try:
        return bool(tracked_files(file.parent, file.name))
    except (OSError, subprocess.CalledProcessError):
        return False


def _with_outputs_of(stored: Any, shown: Any) -> Any:
    """Shown notebook with the stored outputs; the stored notebook if no cell was edited."""

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
