"""Reports to the user while a run rests, each given once: evidence.reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from whyhung.verdict import Verdict
from whyhung.verdict.headline import headline
from whyhung.watch.evidence import Evidence

ACCUSES = "STALLED", "HANG"
SLOW_S = 60.0  # silence before ongoing work is reported as SLOW, doubled after each report
TOLD_SLOW = "SLOW:uncounted", "SLOW:timer"


class Told:
    """Reporter of STALLED and HANG: at once, updated on change, withdrawn when progress resumes.

    SLOW is reported after a minute, at growing intervals. It accuses nobody, so it ends silently.
    """

    def __init__(self, evidence: Evidence, tell: Callable[[dict[str, Any]], Any]) -> None:
        self._evidence, self._tell = evidence, tell
        self.slow_s = SLOW_S  # the silence after which SLOW is reported next

    def report(self, t: float, rest_s: float, verdict: Verdict) -> None:
        """Report the verdict of a look at t, after a silence of rest_s; both in seconds."""
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
        """Withdraw all reports and reset the timing of SLOW, since progress came."""
        self.slow_s = SLOW_S
        self.withdraw(t)

    def withdraw(self, t: float) -> None:
        """Withdraw all standing reports; the user is notified only of those that accuse."""
        for report in self._evidence.reports:
            if report["withdrawn"] is None:
                report["withdrawn"] = t
                if report["label"].startswith(ACCUSES):
                    self._tell(report)
