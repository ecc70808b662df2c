"""Trials on disk: each once, by its id, with its evidence and verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa.lab.evidence import Evidence
from nsa.lab.runner import Spec


class Ledger:
    """Finished trials below `root`, one folder each: a trial that is there is not run again.

    Two supervisors may share one. A folder appears whole or not at all: whoever is killed loses the
    trial in flight and nothing else.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def get(self, id: str) -> tuple[Evidence, Any] | None:
        """(Evidence, Verdict) of a finished trial, else None."""
        raise NotImplementedError

    def put(self, id: str, evidence: Evidence, verdict: Any) -> Path:
        """Writes a finished trial; returns its folder."""
        raise NotImplementedError

    def run(self, spec: Spec, **options: Any) -> tuple[str, Evidence, Any]:
        """(id, Evidence, Verdict): out of the store, or of a trial run now and stored."""
        raise NotImplementedError

    def ids(self) -> list[str]:
        """Of all finished trials, oldest first."""
        raise NotImplementedError
