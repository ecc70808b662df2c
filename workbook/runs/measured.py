"""Rows that a room's command measured, a line of JSON each, joined for its notebook.

A row has `cell`, a mapping, and `outcome`. A command on a GPU machine, which has no notebooks,
writes such a file; the notebook's parameter `rows` names one or several.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbook.lab import todays
from workbook.runs.environment import PACKAGE
from workbook.runs.files import plain, write_atomically

DONE = ("ok", "diverged")  # outcomes that a later row of the same cell does not replace
FILE = "rows.jsonl"

Rows = Sequence[dict[str, Any]]


def check_files(files: Sequence[str], command: str) -> None:
    """Raise ValueError for a name that is no file, and name the command that makes one."""
    for file in files:
        if not _place(file).is_file():
            raise ValueError(f"rows={file!r} is no file; {command} makes one")


def read(files: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of several calls; of a cell in two of them the first that is done.
    ValueError for a file that holds none."""
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            rows = [json.loads(line) for line in _place(file).read_text("utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} holds no rows: {error}") from error
        for row in rows:
            row["cell"] = todays(row["cell"])
            name = json.dumps(row["cell"])
            if found.get(name, {}).get("outcome") not in DONE:
                found[name] = row
    return list(found.values())


def write(rows: Rows, folder: Path) -> None:
    """Write the whole rows into the run's folder, as the command does."""
    lines = (json.dumps(plain(row), allow_nan=False) + "\n" for row in rows)
    write_atomically(folder / FILE, "".join(lines))


def _place(file: str) -> Path:
    """Path of a file named from where the command was given or, as a notebook runs in its own
    folder, from the top of the clone."""
    return Path(file) if Path(file).is_file() else PACKAGE.parent / file
