"""What a fact of the settlement is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """A sentence whose numbers do not move from run to run, and whether it holds.

    holds: None where its trial or run is not there. evidence: ids, "table:...", "trial:..." or
    "run:...". seen: the numbers behind it, which may move.
    """

    name: str
    sentence: str
    holds: bool | None
    evidence: tuple[str, ...]
    seen: str = ""
