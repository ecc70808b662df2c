"""The time that a benchmark may take, and each implementation's share of it."""

import time

CAP_S = 60.0  # an implementation's share, anew whenever kernels may have been compiled


class Clock:
    """What is left of the whole time and of one implementation's share, in seconds."""

    def __init__(self, budget_s: float | None, cap_s: float = CAP_S) -> None:
        now = time.monotonic()
        self.end = float("inf") if budget_s is None else now + budget_s
        self.cap_s = cap_s
        self.share = now + cap_s

    def start(self) -> None:
        """The next implementation's share begins."""
        self.share = time.monotonic() + self.cap_s

    def check(self, needed_s: float, what: str) -> None:
        """Raises NoTime where `what`, which takes needed_s, does not fit any more."""
        now = time.monotonic()
        for end, name in ((self.end, "the budget"), (self.share, "this implementation's share")):
            if now + needed_s > end:
                left = max(0.0, end - now)
                raise NoTime(f"{what} needs {needed_s:.3g} s, {name} has {left:.3g} s left")


class NoTime(Exception):
    """What was to come does not fit into the time that is left."""
