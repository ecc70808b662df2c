"""Subjects of trials in the tests: a stranger's, which know nothing of this package."""

import time
from types import SimpleNamespace


def broken_pair(settings, progress):
    """Raises in step 1 where both are on; the other switches do nothing."""

    def step(i):
        if i == 1 and settings["cache"] and settings["fast"]:
            raise RuntimeError("the cache is stale")
        return 1.0 / (i + 1)

    return SimpleNamespace(step=step)


def paced(settings, progress):
    """Sleeps as long as a step of that size takes: `a + b L + c L T` of its settings."""

    def step(i):
        made.taken += 1
        layers, tokens = settings["layers"], settings["tokens"]
        for _ in range(layers):
            progress.event()
            time.sleep(settings["b"] + settings["c"] * tokens)
        time.sleep(settings["a"] + settings.get("first", 0.0) * (i == 0))
        if settings.get("breaks"):
            raise RuntimeError("at any size")

    made = SimpleNamespace(step=step, taken=0)
    return made


def unsized(settings, progress):
    """Takes a twentieth of a second, whatever its settings."""
    return SimpleNamespace(step=lambda i: time.sleep(0.05))


def make_up_trials(monkeypatch, run):
    """A ledger's trials without processes: `run` in place of the runner's, judged by their end."""
    from whyhung.process import preflight, runner
    from whyhung.verdict import Verdict
    from workbook.lab.search import ledger

    def judge(evidence):
        kind = {"returned": "PASS", "exception": "CRASH"}.get(evidence.end.how, "INCONCLUSIVE")
        return Verdict(kind, evidence.end.type, "made up", ("it was made up",))

    monkeypatch.setattr(preflight, "source_hash", lambda subject: "source")
    monkeypatch.setattr(preflight, "environment", lambda python=None: {})
    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(ledger, "judge", judge)
