"""Instruments for trainings.

A trial of a training depends on this whole package, except the parts that no trial imports.
"""

import json
from pathlib import Path

from whyhung.process import renamed, sources

sources.PACKAGES[Path(__file__).resolve().parents[1]] = ("workbook", "cli", "__main__.py")
renamed.MOVED |= json.loads(Path(__file__).with_name("moved.json").read_text(encoding="utf-8"))
