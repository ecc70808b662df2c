"""Tiny notebooks for the workbook's tests."""

import sys
from pathlib import Path

import nbformat
import psutil

PARAMETERS = """\
layers: int = 2  # how many (1..64)
rate: float = 0.5  # learning rate
lengths: list[int] = [128, 256]  # sequence lengths (16..)
precision: str = "fp32"  # one of: fp32, bf16
names: list[str] = ["gather"]  # which backends
deep: bool = False  # go deeper
seed: int = 1337  # of everything random"""

RUN = """\
from workbook.runs import store
run = store.current({"layers": layers}, notebook="tiny")
"""
SET_UP = RUN + 'run.device("cpu")\n'  # loads torch


def write_notebook(path: Path, *cells: str, parameters: str | None = PARAMETERS) -> Path:
    """A notebook with a question, a parameters cell and the given code cells."""
    v4 = nbformat.v4
    book = v4.new_notebook()
    book.metadata.kernelspec = {"name": "python3", "language": "python", "display_name": "Python"}
    book.cells.append(v4.new_markdown_cell("# Tiny\n\n**Question.** Does it *run*?\n\nMore text."))
    if parameters is not None:
        cell = v4.new_code_cell(parameters)
        cell.metadata.tags = ["parameters"]
        book.cells.append(cell)
    book.cells += [v4.new_code_cell(source) for source in cells]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, path)
    return path


def code_cells(path: Path) -> list:
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def statuses(path: Path) -> list[str]:
    return [cell.metadata.papermill.status for cell in code_cells(path)]


def text_of(cell) -> str:
    """Everything a cell printed."""
    return "".join(o.text for o in cell.outputs if o.output_type == "stream")


def errors_of(cell) -> list[str]:
    return [o.ename for o in cell.outputs if o.output_type == "error"]


def marked_sleepers(mark: str) -> list[psutil.Process]:
    """Live processes whose command line holds `mark`."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def sleeper(mark: str) -> str:
    """Code of a cell that leaves two processes behind: a child in a session of its own, and one
    whose parent is gone (started by a process that ended), as launchers of workers leave them."""
    code = f"import time; time.sleep(600)  # {mark}"
    inner = f"import subprocess; subprocess.Popen([{sys.executable!r}, '-c', {code!r}, {mark!r}])"
    return (
        "import subprocess, sys\n"
        f"line = [sys.executable, '-c', {code!r}, {mark!r}]\n"
        "child = subprocess.Popen(line, start_new_session=True)\n"
        f"subprocess.run([sys.executable, '-c', {inner!r}], start_new_session=True)\n"
        "print('started')"
    )


def hang_after(touched: Path) -> str:
    """Code of a cell that makes this file and does not end."""
    return f"open({str(touched)!r}, 'w').close()\nimport time; time.sleep(600)"
