"""Instruments for trainings.

A trial of a training depends on all of nsa and of workbook, except the parts that no trial imports.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nsa
from whyhung.process import renamed, sources

sources.PACKAGES[Path(nsa.__file__).resolve().parent] = ("__main__.py",)
sources.PACKAGES[Path(__file__).resolve().parents[1]] = ("runs", "cli", "__main__.py")
# Keys of stored rows and parameters that have another name today.
CALLED = {"arm": "variant", "arms": "variants"}
renamed.MOVED |= json.loads(Path(__file__).with_name("moved.json").read_text(encoding="utf-8"))


def todays(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored mapping under today's keys, with its subject at today's place."""
    found = {CALLED.get(name, name): value for name, value in stored.items()}
    if isinstance(subject := found.get("subject"), str):
        found["subject"] = renamed.current(subject)
    return found
