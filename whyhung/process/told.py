"""Reports to the user while a run rests, each told once: evidence.reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whyhung.verdict import Verdict
from whyhung.verdict.headline import headline
from whyhung.watch.evidence import Evidence

ACCUSES = "STALLED", "HANG"
SLOW_S = 60.0  # of silence while somebody works: then it is told, and again after twice as long
TOLD_SLOW = "SLOW:uncounted", "SLOW:timer"


class Told:
    """STALLED and HANG at once, upgraded when that changes, withdrawn when it goes on.

    SLOW after a minute, and at growing distances. It accuses nobody, so it ends without a word.
    """

    def __init__(self, evidence: Evidence, tell: Callable[[dict[str, Any]], Any]) -> None:
        self._evidence, self._tell = evidence, tell
        self.slow_s = SLOW_S  # the silence after which SLOW is told next

    def report(self, t: float, rest_s: float, verdict: Verdict) -> None:
        """`verdict` is that of a look at t, after a silence of rest_s; both in seconds."""
        reports = self._evidence.reports
        stands = reports[-1]["label"] if reports and reports[-1]["withdrawn"] is None else ""
        if verdict.label in TOLD_SLOW:
            if not stands.startswith("SLOW"):
                self.withdraw(t)  # somebody works again
            if rest_s < self.slow_s:
                return
            while self.slow_s <= rest_s:
                self.slow_s *= 2
        elif verdict.kind not in ACCUSES or stands == verdict.label:
            return
        if stands.startswith("SLOW"):
            self.withdraw(t)
        names = "rank", "rested_s", "where", "left_s"
        told = {name: verdict.numbers.get(name) for name in names}
        words = {"headline": headline(self._evidence, verdict), "because": [*verdict.because[:3]]}
        report = {"t": t, "label": verdict.label, "line": verdict.line, "withdrawn": None}
        reports.append({**report, **told, **words})
        self._tell(reports[-1])

    def moves(self, t: float) -> None:
        """Progress came: nothing stands any more."""
        self.slow_s = SLOW_S
        self.withdraw(t)

    def withdraw(self, t: float) -> None:
        """Whatever stands; of what accuses, the user hears."""
        for report in self._evidence.reports:
            if report["withdrawn"] is None:
                report["withdrawn"] = t
                if report["label"].startswith(ACCUSES):
                    self._tell(report)
