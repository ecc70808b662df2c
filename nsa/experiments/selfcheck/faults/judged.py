"""What was planted beside what it was called: the rows of a selfcheck."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

NOTHING = "not run"


@dataclass(frozen=True)
class Judged:
    """One fault in one round: what it should be called, what it was called, and why.

    found: the verdict's kind, or "not run" with the reason in `skipped`. named_s: from the freeze
    to the verdict, for a HANG. seconds: of the trial or trials, start-up included. track: (seconds
    since the first step, share of the steps done) as the rank that the verdict is about was seen.
    """

    name: str
    control: bool
    expected: tuple[str, ...]
    what: str
    found: str
    found_what: str = ""
    rule: str = ""
    because: tuple[str, ...] = ()
    place: str = ""
    seconds: float = 0.0
    named_s: float | None = None
    round: int = 1
    skipped: str = ""
    text: str = ""
    track: tuple[tuple[float, float], ...] = ()

    @property
    def right(self) -> bool:
        """Called what it is; one that was not run is neither right nor wrong."""
        return self.found in self.expected and (not self.what or self.found_what == self.what)

    @property
    def missed(self) -> bool:
        return not self.right and not self.skipped

    @property
    def label(self) -> str:
        """HANG:blocked, PASS, ..."""
        return f"{self.found}:{self.found_what}" if self.found_what else self.found

    @property
    def due(self) -> str:
        """What it should be called: HANG:blocked, PASS or SLOW, ..."""
        return due(self.expected, self.what)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"right": self.right}


def due(kinds: Sequence[str], what: str) -> str:
    """HANG:blocked, PASS or SLOW, ..."""
    return " or ".join(f"{kind}:{what}" if what else kind for kind in kinds)


def line(row: Judged) -> str:
    """One row for people: right, skipped or MISSED, with what was found."""
    if row.skipped:
        return f"skipped  {row.name}: {row.skipped}"
    end = f"{row.name}: {row.label} in {row.seconds:.1f} s"
    if row.right:
        return f"right    {end}"
    return f"MISSED   {end}, planted was {row.due} [{row.rule}: {'; '.join(row.because)}]"


def matrix(rows: Iterable[Judged]) -> dict[str, dict[str, int]]:
    """{expected: {found: count}} of all that were run; controls have rows of their own."""
    table: dict[str, dict[str, int]] = {}
    for row in rows:
        if row.skipped:
            continue
        due = " or ".join(row.expected)
        counts = table.setdefault(f"control {due}" if row.control else due, {})
        counts[row.found] = counts.get(row.found, 0) + 1
    return table
