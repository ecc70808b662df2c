"""Running notebooks, storing their results, and showing them.

`load("runs/...")` opens a stored run in any notebook, `explore(run, ...)` browses its numbers.
"""

from importlib import import_module

_HOME = {"load": "workbook.runs.loaded", "explore": "workbook.runs.loaded"}

__all__ = [*_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'workbook.runs' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
