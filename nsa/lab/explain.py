"""A trial's verdict, its rule and its evidence as a page: for a terminal, or as markdown."""

from __future__ import annotations

from nsa.lab.evidence import Evidence
from nsa.lab.verdict import Verdict


def page(
    evidence: Evidence, verdict: Verdict | None = None, *, name: str = "", markdown: bool = False
) -> str:
    """Verdict, rule, what it read, progress, stacks, oracles, rerun; `verdict` None: judged now."""
    raise NotImplementedError
