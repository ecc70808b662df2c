"""The decision tree of hung-or-slow, run on evidence: questions, the answers given, a conclusion.

And GO or NO-GO for the loop under test, from rules with thresholds.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nsa.experiments.case_study.figures import BAND_US, TIMINGS
from nsa.experiments.case_study.loop.design import DESIGNS
from nsa.experiments.case_study.step5.investigation import Results

TARGET = 300.0  # tokens/s, the case study's own least
FEWER = 10.0  # times fewer operations, for a step that operations explain


@dataclass(frozen=True)
class Question:
    """A node: what is asked, of which evidence, and the names of what follows either answer."""

    text: str
    ask: Callable[[Results], bool | None]
    yes: str
    no: str


LEAVES = {
    "PASS": "PASS: nothing to explain",
    "HANG": "HANG: a proof says that it cannot go on",
    "RERUN": "rerun at twice the deadline: the same P is HANG",
    "LEAK": "FAIL: something grows from step to step",
    "ELSEWHERE": "SLOW: profile it, dispatch is not the cause",
    "DISPATCH": "SLOW: as many operations as the loop has tokens",
}


def _late(results: Results):
    return results.named.get("1 x")


def _ended(results: Results) -> bool | None:
    trial = _late(results)
    return None if trial is None else trial.finished


def _moves(results: Results) -> bool | None:
    trial = _late(results)
    return None if trial is None else trial.verdict.kind == "SLOW"


def _proof(results: Results) -> bool | None:
    trial = _late(results)
    return None if trial is None else trial.verdict.kind == "HANG"


def _further(results: Results) -> bool | None:
    pair = [results.named.get(name) for name in ("1 x", "2 x")]
    return None if None in pair else pair[1].reached > pair[0].reached or pair[1].finished


def _same_state(results: Results) -> bool | None:
    if results.state is None:
        return None
    return not [r for r in results.state["rows"] if r["changed"] and not r["should"]]


def _operations(results: Results) -> bool | None:
    rows = {(row["path"], row["tokens"]): row for row in results.operations}
    tokens = results.lab.setup.tokens
    loop, masked = rows.get(("loop", tokens)), rows.get(("masked", tokens))
    if loop is None or masked is None:
        return None
    fewer = loop["operations"] > FEWER * masked["operations"]
    return fewer and loop["seconds"] > FEWER / 2 * masked["seconds"]


TREE = {
    "ended": Question("Did it end by itself?", _ended, "PASS", "moves"),
    "moves": Question("Does P move?", _moves, "further", "proof"),
    "proof": Question("Is there a proof\nthat it cannot go on?", _proof, "HANG", "RERUN"),
    "further": Question("Does it come further\nin twice the time?", _further, "state", "RERUN"),
    "state": Question("Is the state alike after\nsteps 4 and 5?", _same_state, "operations",
                      "LEAK"),
    "operations": Question("Do operations\nexplain the time?", _operations, "DISPATCH",
                           "ELSEWHERE"),
}  # fmt: skip


def decide(results: Results) -> list[tuple[str, bool | None]]:
    """(node, answer) from the first question to the leaf; it ends where evidence is missing."""
    path: list[tuple[str, bool | None]] = []
    node = "ended"
    while node in TREE:
        answer = TREE[node].ask(results)
        path.append((node, answer))
        if answer is None:
            return path
        node = TREE[node].yes if answer else TREE[node].no
    return [*path, (node, None)]


def conclusion(results: Results) -> str:
    """The leaf, in words; which question has no answer where one is missing."""
    last = decide(results)[-1][0]
    missing = f"INCONCLUSIVE: no evidence for {last!r}"
    return LEAVES.get(last, missing)


@dataclass(frozen=True)
class Reason:
    """One rule of GO or NO-GO."""

    rule: str
    holds: bool | None
    because: str

    def __str__(self) -> str:
        word = {True: "GO", False: "NO-GO", None: "INCONCLUSIVE"}[self.holds]
        return f"{word}: {self.rule}; {self.because}"


def go(results: Results) -> list[Reason]:
    """Whether the case study's training could have started, rule by rule."""
    hung = [t.id for t in results.trials if t.verdict.kind == "HANG"]
    step5 = TIMINGS[-1]
    best_us = BAND_US[0]
    rate = 1e6 * step5.tokens / (step5.operations * best_us)
    defects = DESIGNS[results.lab.setup.design]().defects
    return [
        Reason("nothing hangs", not hung,
               f"{len(results.trials)} trials, of which {len(hung)} are HANG"),
        Reason(f"at least {TARGET:g} tokens/s", rate >= TARGET,
               f"{step5.operations:,} operations a step at {best_us:g} us, the least seen, allow "
               f"{rate:.0f}"),
        Reason("attention is attention", not defects, f"it has {', '.join(defects) or 'none'}"),
    ]  # fmt: skip


def verdict(reasons: list[Reason]) -> str:
    """GO only if every rule holds."""
    if any(r.holds is False for r in reasons):
        return "NO-GO"
    return "GO" if all(r.holds for r in reasons) else "INCONCLUSIVE"
