"""Execute notebooks in place with their defaults, and keep them free of volatile metadata.

    python -m workbook.runs.refresh notebooks/*.ipynb            execute and clean
    python -m workbook.runs.refresh --clean notebooks/*.ipynb    clean only
    python -m workbook.runs.refresh --check notebooks/*.ipynb    fail if one is not clean

Outputs and execution counts stay: nbval compares no cell without a count.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from workbook.runs.files import lighten, write_notebook

CELL_TIMEOUT_S = 600
VOLATILE = (
    "metadata.language_info.version",
    "metadata.papermill",
    "metadata.widgets",
    "cell.metadata.ExecuteTime",
    "cell.metadata.collapsed",
    "cell.metadata.execution",
    "cell.metadata.papermill",
    "cell.metadata.scrolled",
)
# Kernel of whichever Python opens the notebook.
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def clean(paths: list[Path], check: bool = False) -> int:
    """Strip `VOLATILE` keys and random cell ids. With `check`, only return 1 if there are any."""
    if not paths:
        return 0
    command = [sys.executable, "-m", "nbstripout", "--keep-output", "--keep-count"]
    command += ["--extra-keys", " ".join(VOLATILE), *(["--verify"] if check else [])]
    return subprocess.run([*command, *map(str, paths)], check=False).returncode


def execute(path: Path) -> None:
    """Run every cell in a fresh kernel of this interpreter; replace the file once all passed.
    Raises papermill.exceptions.PapermillExecutionError if a cell fails; the file is then
    unchanged."""
    import papermill

    from workbook.runs import engine

    notebook = papermill.execute_notebook(
        str(path),
        None,
        engine_name=engine.register(),
        kernel_name="python3",
        language="python",
        progress_bar=False,
        kernel_cwd=str(path.resolve().parent),
        environment=os.environ | {"NSA_HEADLESS": "1"},
        cell_timeout_s=CELL_TIMEOUT_S,
    )
    notebook.metadata.kernelspec = dict(KERNEL)
    for cell in notebook.cells:
        if not cell.metadata.tags:  # papermill's, for cells without any
            del cell.metadata["tags"]
    write_notebook(path, lighten(notebook))


def main(arguments: list[str] | None = None) -> int:
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m workbook.runs.refresh", description=about)
    parser.add_argument("notebooks", nargs="*", type=Path)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--check", action="store_true", help="only fail if one is not clean")
    how.add_argument("--clean", action="store_true", help="clean without executing")
    given = parser.parse_args(arguments)
    missing = [str(path) for path in given.notebooks if not path.is_file()]
    if missing:
        parser.error(f"no such notebook: {', '.join(missing)}")
    if not (given.check or given.clean):
        for path in given.notebooks:
            print(f"executing {path}", flush=True)
            execute(path)
    return clean(given.notebooks, check=given.check)


if __name__ == "__main__":
    sys.exit(main())
