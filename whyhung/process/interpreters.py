"""Check that another interpreter, with its own torch, can run a subject, else suggest a remedy.

It uses this package from here, and its own installation of all others: torch, numpy, jaxtyping.
"""

from __future__ import annotations

import importlib
import shutil
from functools import lru_cache
from typing import Any

from whyhung.process import script, trial

DEADLINE_S = 180.0  # to load torch once, from a cold disk


@lru_cache(maxsize=32)
def check(python: str, subject: str) -> dict[str, str]:
    """Return its versions, {"python", "torch"}; loads torch and the subject's module there, once.

    Raises ValueError, with a remedy, if the interpreter does not exist, has no torch, or cannot
    import the subject.
    """
    if shutil.which(python) is None:
        raise ValueError(
            f"python={python!r} cannot be run: there is no such program; the path of one would do, "
            "as /path/of/venv/bin/python, after `python -m venv /path/of/venv`"
        )
    module = None if script.is_script(subject) else subject.partition(":")[0]
    try:
        ended = trial.run_child(
            "whyhung.process.interpreters:imported", {"module": module},
            deadline_s=DEADLINE_S, python=python,
        )  # fmt: skip
    except OSError as error:  # no program of this system
        raise ValueError(f"python={python!r} cannot be run: {error.strerror}") from None
    if ended.status == "ok":
        return ended.result
    what = "torch" if module is None else module
    said = ended.message or ended.status
    if ended.returncode and "No module named" in ended.evidence:  # this package itself
        said = ended.evidence.strip().splitlines()[-1]
    missing = said.partition("No module named ")[2].strip("'\")")
    would = f"`{python} -m pip install {missing}` would do"
    if missing == "torch":
        raise ValueError(f"python={python!r} has no torch; {would}")
    if missing and missing.partition(".")[0] != what.partition(".")[0]:
        said = f"{said}; {would}"
    elif ended.returncode == 0:
        said += "; is it a Python interpreter?"
    raise ValueError(f"python={python!r} cannot import {what}: {said}")


def imported(given: dict[str, Any]) -> dict[str, str]:
    """Body of `check`'s child: import torch and the module, and return the versions."""
    import platform

    torch = importlib.import_module("torch")
    if given["module"] is not None:
        importlib.import_module(given["module"])
    return {"python": platform.python_version(), "torch": torch.__version__}
