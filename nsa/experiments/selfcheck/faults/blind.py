"""Evidence of a planted fault without anything that names what was planted."""

import re
from typing import Any

from nsa.experiments.selfcheck.faults import Fault
from nsa.lab.watch.evidence import Evidence

_FILE = re.compile(r"(?:[\w./-]*/)?nsa/experiments/selfcheck/faults/\w+\.py")
_MODULE = re.compile(r"nsa\.experiments\.selfcheck\.faults(?:\.\w+)*(?::\w+)?")
_HIDDEN = ("subject", "settings")


def blind(evidence: Evidence, fault: Fault) -> Evidence:
    """The evidence without what tells which fault it is of."""
    return Evidence.from_dict(_without(evidence.to_dict(), fault.subject.partition(":")[2]))


def _without(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {
            key: _without(item, name)
            for key, item in value.items()
            if not (key in _HIDDEN and "steps" in value)
        }
    if isinstance(value, list | tuple):
        return [_without(item, name) for item in value]
    if isinstance(value, str):
        value = _MODULE.sub("subject", _FILE.sub("subject.py", value))
        return re.sub(rf"\b{re.escape(name)}\b", "Subject", value)
    return value
