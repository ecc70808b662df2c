"""Subjects of trials in the tests: a stranger's, which know nothing of this package."""

import os
from types import SimpleNamespace


def broken_pair(settings, progress):
    """Raises in step 1 where both are on; the other switches do nothing."""

    def step(i):
        if i == 1 and settings["cache"] and settings["fast"]:
            raise RuntimeError("the cache is stale")
        return 1.0 / (i + 1)

    return SimpleNamespace(step=step)


def variable(settings, progress):
    """Raises where the environment says so."""

    def step(i):
        if os.environ.get("LAB_SWITCH") == "1":
            raise ValueError("switched")

    return SimpleNamespace(step=step)
