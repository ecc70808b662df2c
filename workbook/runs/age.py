"""Age of evidence: changes since its commit in the code that most of it is about."""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from workbook.runs.files import git
from workbook.runs.identity import PACKAGE

WHERE = ("nsa/kernels", "nsa/attention", "nsa/reference")
WORDS = "kernels, attention and reference"


@dataclass(frozen=True)
class Age:
    """Commits since `commit` that touched WHERE, and their lines; None if unknown."""

    commit: str
    commits: int | None = None
    added: int = 0
    removed: int = 0

    @property
    def known(self) -> bool:
        return self.commits is not None

    @property
    def fresh(self) -> bool:
        """True if the age is known, and nothing has changed since."""
        return self.commits == 0

    def __str__(self) -> str:
        if not self.commit:
            return f"of no known commit: what changed in {WORDS} since is unknown"
        of = f"of {self.commit[:12]}"
        if not self.known:
            return f"{of}, which git has not here: what changed in {WORDS} since is unknown"
        if not self.commits:
            return f"{of}: nothing changed in {WORDS} since"
        lines = f"{self.added:,} lines more and {self.removed:,} less"
        some = f"{self.commits} commit{'s' * (self.commits > 1)}"
        return f"{of}: {some} with {lines} touched {WORDS} since"


@lru_cache
def since(commit: str, at: str = "HEAD", top: Path = PACKAGE.parent) -> Age:
    """Commits and lines that touched WHERE from `commit` to `at`."""
    if not re.fullmatch("[0-9a-f]{7,40}", commit):
        return Age("")
    span = (f"{commit}..{at}", "--", *WHERE)
    count = git(top, "rev-list", "--count", *span)
    if not count:
        return Age(commit)
    told = git(top, "diff", "--shortstat", *span)
    added, removed = (re.search(rf"(\d+) {what}", told) for what in ("insertion", "deletion"))
    return Age(commit, int(count), int(added[1] if added else 0), int(removed[1] if removed else 0))
