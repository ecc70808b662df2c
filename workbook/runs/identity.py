"""Identity of a run: its notebook, its question, and the id that makes a rerun a cache hit."""

import hashlib
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePath, PurePosixPath

import nsa
from nsa.spelling import nearest

PACKAGE = Path(nsa.__file__).resolve().parent
BESIDE = "whyhung", "workbook"  # the packages beside it, which are part of the project


def find_notebook(name: str | Path, folder: str | Path = "notebooks") -> Path:
    """Find a notebook by path, name, number or part of its name (`1`, `01`, `memory_scaling`,
    `scaling`). ValueError for a missing path; if no name or several match, it lists the nearest."""
    path = Path(name)
    if path.suffix == ".ipynb" and path.is_file():
        return path
    if path.suffix == ".ipynb" and path.name != str(name):
        # one of the same name elsewhere would be another notebook
        raise ValueError(f"there is no file {name}; name a notebook of {folder}, or a right path")
    found = {p.stem: p for p in notebooks(folder)}
    if not found:
        raise ValueError(f"no notebooks in {folder}; name one by its path")
    name = path.stem if path.suffix == ".ipynb" else str(name)
    named = {stem: (stem, re.sub(r"^\d+_", "", stem)) for stem in found}
    number = re.compile(rf"0*{int(name)}_" if name.isdecimal() else r"\b\B")
    fits = (
        [stem for stem, names in named.items() if name in names]
        or [stem for stem in found if number.match(stem)]
        or [stem for stem, names in named.items() if any(n.startswith(name) for n in names)]
        or [stem for stem in found if name in stem]
    )
    if len(fits) == 1:
        return found[fits[0]]
    if fits:
        raise ValueError(f"{name!r} fits {', '.join(fits)}; give more of one")
    raise ValueError(f"no notebook {name!r} in {folder}; {nearest(name, found)}")


def notebooks(folder: str | Path = "notebooks") -> list[Path]:
    return sorted(Path(folder).glob("*.ipynb"))


def question(notebook: str | Path) -> str:
    """Question of the notebook: the part of a text cell after the word Question, else its title."""
    cells = read_cells(notebook)
    texts = ["".join(c["source"]) for c in cells if c.get("cell_type") == "markdown"]
    for text in texts[:3]:
        found = re.search(r"^\W*question\W*\s+(.+?)(?:\n\s*\n|\n#|\Z)", text, re.I | re.S | re.M)
        if found:
            # underscores inside a name are no emphasis
            marks = r"[*`]{1,2}|(?<!\w)_{1,2}|_{1,2}(?!\w)"
            return re.sub(marks, "", " ".join(found.group(1).split()))
    return title(cells)


def title(cells: list[dict]) -> str:
    """First heading of the first text cell, or ""."""
    texts = ["".join(c["source"]) for c in cells if c.get("cell_type") == "markdown"]
    found = re.search(r"^#\s+(.+)$", texts[0], re.M) if texts else None
    return found.group(1).strip() if found else ""


def run_id(
    notebook: str | Path, parameters: dict, environment: dict, what: str | None = None
) -> str:
    """8 hex digits of hash(spec + source + environment).

    spec: notebook and every parameter; source: `source(notebook)`, or `what` if it is known
    already; environment: versions and GPUs, not dates or variables.
    """
    spec = {"notebook": Path(notebook).stem, "parameters": parameters}
    keys = ("python", "torch", "cuda", "triton", "flash_attn", "flash_attn_4")
    facts = {key: environment.get(key) for key in keys}
    facts["gpus"] = [gpu.get("name") for gpu in environment.get("gpus") or []]
    parts = json.dumps([spec, what or source(notebook), facts], sort_keys=True, default=str)
    return hashlib.sha256(parts.encode()).hexdigest()[:8]


def source(notebook: str | Path) -> str:
    """Hash of the code that runs: the notebook's cells (not their outputs), all of the packages."""
    files = {path.relative_to(PACKAGE): path.read_bytes() for path in PACKAGE.rglob("*.py")}
    top = PACKAGE.parent
    files |= {p.relative_to(top): p.read_bytes() for b in BESIDE for p in (top / b).rglob("*.py")}
    return _digest(read_cells(notebook), files)


def source_at(commit: str, notebook: str, top: str | Path = PACKAGE.parent) -> str | None:
    """`source` of the notebook of that name in that commit's tree; None if git has no such commit,
    or the commit no such notebook."""
    package, book = PACKAGE.name, f"notebooks/{notebook}.ipynb"
    git = ["git", "-C", str(top)]
    run = partial(subprocess.run, capture_output=True, timeout=60)
    try:
        has = run([*git, "ls-tree", "--name-only", commit, "--", *BESIDE], check=True).stdout
        names = package, book, *has.decode().split()
        done = run([*git, "archive", "--format=tar", commit, *names], check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        files = {PurePosixPath(m.name): tar.extractfile(m).read() for m in tar if m.isfile()}
    cells = json.loads(files.pop(PurePosixPath(book)))["cells"]
    code = {
        p if p.parts[0] in BESIDE else p.relative_to(package): content
        for p, content in files.items()
        if p.suffix == ".py"
    }
    return _digest(cells, code)


def _digest(cells: list[dict], files: Mapping[PurePath, bytes]) -> str:
    digest = hashlib.sha256()
    for cell in cells:
        tags = sorted(cell.get("metadata", {}).get("tags", []))
        digest.update(json.dumps([cell.get("cell_type"), "".join(cell["source"]), tags]).encode())
    for path in sorted(files):
        digest.update(path.as_posix().encode() + b"\0" + files[path])
    return digest.hexdigest()[:16]


def read_cells(notebook: str | Path) -> list[dict]:
    """Cells of a notebook as in its JSON. ValueError if the file is no notebook."""
    try:
        return json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{notebook} is not a notebook; open and save it in JupyterLab") from None
