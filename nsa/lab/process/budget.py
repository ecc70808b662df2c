"""Seconds that several trials share."""

import math
import os
import time

RUN_ENDS = "NSA_RUN_ENDS"  # environment variable: when a run's timeout ends it, by time.monotonic()
KEPT, LEAST_KEPT_S = 0.1, 20.0  # share of what a run has left, seconds


class Budget:
    """Runs from its making on. What it leaves no time for was not tried, which is no finding.

    Inside a run that a timeout will end (RUN_ENDS) it is no more than the run has left, without a
    tenth of that, or LEAST_KEPT_S, for what comes after: what was measured must still be judged.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        now = time.monotonic()
        left = float(os.environ.get(RUN_ENDS, math.inf)) - now
        most = max(0.0, min((1 - KEPT) * left, left - LEAST_KEPT_S))
        self.used_up = f"the budget of {seconds:g} s was used up"
        if most < seconds:
            self.used_up = f"the {most:.0f} s that the run's timeout left for this were used up"
        self._end = now + min(seconds, most)

    def share(self, deadline_s: float) -> float:
        """Seconds for the next trial, at most its deadline; 0 or less when none are left."""
        return min(deadline_s, self._end - time.monotonic())

    def judged(
        self, status: str, message: str, share_s: float, deadline_s: float
    ) -> tuple[str, str]:
        """(status, message) of a trial that had `share_s`: cut short by the budget, it is no
        "timeout" but "not run"."""
        if status != "timeout" or share_s >= deadline_s:
            return status, message
        return "not run", f"{self.used_up} after {share_s:.0f} s of this one"
