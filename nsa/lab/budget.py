"""Seconds that several trials share."""

import math
import time


class Budget:
    """Runs from its making on. What it leaves no time for was not tried, which is no finding."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.used_up = f"the budget of {seconds:g} s was used up"
        self._end = time.monotonic() + seconds

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
