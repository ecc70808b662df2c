"""Instruments for trainings.

A trial of a training depends on all of nsa and of workbook, except the parts that no trial imports.
"""

import json
from pathlib import Path

import nsa
from whyhung.process import renamed, sources

sources.PACKAGES[Path(nsa.__file__).resolve().parent] = ("__main__.py",)
sources.PACKAGES[Path(__file__).resolve().parents[1]] = ("runs", "cli", "__main__.py")
renamed.MOVED |= json.loads(Path(__file__).with_name("moved.json").read_text(encoding="utf-8"))
