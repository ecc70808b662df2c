"""Real defects of the case study as one-line mutations of this code.

Each cost weeks of work, because no test detected it. Now each has a killer, which fails when the
line is changed; `tests/workbook/rooms/correctness/test_mutants.py` verifies it.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nsa.spelling import nearest

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Mutant:
    """One mutation, with the fields of mutants.yaml."""

    shows: tuple[str, ...]
    lesson: Sequence[Any] | str
    defect: str
    file: str
    before: str
    after: str
    killer: str


def mutated_copy(folder: str | Path, name: str = "") -> Path:
    """Copy the package, its tests if any, and pytest's configuration to `folder`/project.

    The line of the named mutant is changed. Raises ValueError if the line is not there, and for an
    unknown name, with the nearest. Compiled files are copied too, since a copied source keeps its
    modification time; those of the changed file are removed.
    """
    root = Path(folder) / "project"
    ignore = shutil.ignore_patterns(".*", "*.pyc.*")  # the latter while one is being written
    for part in ("nsa", "whyhung", "workbook", "tests"):
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, root / part, ignore=ignore)
    if (ROOT / "pyproject.toml").is_file():
        shutil.copy(ROOT / "pyproject.toml", root)
    if name:
        one = mutant(name)
        source = (root / one.file).read_text()
        if source.count(one.before) != 1:
            raise ValueError(
                f"mutant {name!r}: {source.count(one.before)} places in {one.file} read "
                f"{one.before!r}, wanted 1; rewrite the mutant with the code it mutates"
            )
        changed = root / one.file
        changed.write_text(source.replace(one.before, one.after))
        for compiled in changed.parent.glob(f"__pycache__/{changed.stem}.*"):
            compiled.unlink()
    return root


def mutant(name: str) -> Mutant:
    """Return the mutant of that name; ValueError for an unknown one, naming the nearest."""
    if name not in MUTANTS:
        raise ValueError(f"mutant {name!r} is unknown; {nearest(name, MUTANTS)}")
    return MUTANTS[name]


_FILE = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
MUTANTS = {
    name: Mutant(**one | {"shows": tuple(one["shows"])})
    for name, one in yaml.safe_load(_FILE).items()
}
