"""Default places of notebooks and runs, if the command line does not name them."""

import os
import shutil
import tempfile
from pathlib import Path

import workbook
from nsa.spelling import nearest

PACKAGE = Path(workbook.__file__).resolve().parent


def shipped() -> Path:
    """Notebooks that came with the package: those of its clone, else those inside the wheel."""
    clone = PACKAGE.parent / "notebooks"
    return clone if (clone / "params").is_dir() else PACKAGE / "notebooks"


def home() -> Path | None:
    """Current folder if it has notebooks, else the nearest above it that is a clone or was made by
    `init`, recognized by `notebooks/params`. None if there is none."""
    here = Path.cwd()
    if any(here.glob("notebooks/*.ipynb")):
        return here
    above = (folder for folder in here.parents if (folder / "notebooks/params").is_dir())
    return next((folder for folder in above if any(folder.glob("notebooks/*.ipynb"))), None)


def notebooks() -> str:
    """Notebooks of `home`, else those that came with the package."""
    found = home()
    return _shown(found / "notebooks") if found else str(shipped())


def beside(name: str) -> str:
    """`name` ("runs", "trials") beside the notebooks of `home`, else in the current folder."""
    return _shown(home() / name) if home() else name


def parameter_file(name: str, folder: str | Path) -> Path:
    """File of parameters, by path or by the name of one beside the notebooks in `folder` (`h200`,
    `h200.yaml`, `notebooks/params/h200.yaml`). ValueError if there is neither."""
    path = Path(name)
    if path.exists():
        return path
    found = {file.name: file for file in Path(folder, "params").glob("*.yaml")}
    if path.parent.as_posix() in (".", "notebooks/params"):
        for wanted in (path.name, f"{path.name}.yaml"):
            if wanted in found:
                return found[wanted]
    also = f" or in {folder}/params; {nearest(path.name, found, 0)}" if found else ""
    raise ValueError(f"cannot read the parameter file {name}: there is none here{also}")


def init(folder: str | Path) -> Path:
    """Copy the shipped notebooks and their parameter files to `folder`/notebooks, all or none.

    ValueError if that exists already, or cannot be written.
    """
    target = Path(folder, "notebooks")
    if target.exists():
        raise ValueError(f"{target} is there already, and is left as it is; name another folder")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".notebooks-", dir=folder) as made:
            copy = Path(made, "notebooks")
            left = shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__")
            shutil.copytree(shipped(), copy, ignore=left)
            copy.rename(target)
    except OSError as error:
        raise ValueError(f"cannot write {target}: {error.strerror or error}") from None
    return target


def _shown(path: Path) -> str:
    return os.path.relpath(path)
