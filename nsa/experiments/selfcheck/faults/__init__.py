"""Planted faults, and controls that only look like some: the lab's own test.

Each is a subject that a supervisor runs and a judge judges without knowing what was planted.
"""

from nsa.experiments.selfcheck.faults.registry import (
    CONTROLS,
    FAULTS,
    PLANTED,
    Fault,
    chosen,
    why_not,
)

__all__ = ["CONTROLS", "FAULTS", "PLANTED", "Fault", "chosen", "why_not"]
