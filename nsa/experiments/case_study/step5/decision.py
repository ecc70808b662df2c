"""The decision tree of hung-or-slow, run on evidence: questions, the answers given, a conclusion.

And GO or NO-GO for the loop under test, from rules with thresholds.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nsa.experiments.case_study.figures import BAND_US, TIMINGS
from nsa.experiments.case_study.loop.design import design
from nsa.experiments.case_study.step5.trials import Results, Trial

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
    "HANG": "HANG: nobody is left who could end its wait",
    "STALLED": "STALLED, or SLOW uncounted: its page says why",
    "RERUN": "INCONCLUSIVE: it moves and comes no further; rerun it",
    "LEAK": "FAIL: something grows from step to step",
    "ELSEWHERE": "SLOW: profile it, dispatch is not the cause",
    "DISPATCH": "SLOW: as many operations as the loop has tokens",
}


def _late(ask: Callable[[Trial], bool]) -> Callable[[Results], bool | None]:
    """Asked of the trial under the old deadline."""
    return lambda results: ask(results.named["1 x"]) if "1 x" in results.named else None


def _further(results: Results) -> bool | None:
    once, twice = (results.named.get(name) for name in ("1 x", "2 x"))
    return once and twice and (twice.reached > once.reached or twice.finished)


def _same_state(results: Results) -> bool | None:
    if results.state is None:
        return None
    return not any(row["changed"] and not row["should"] for row in results.state["rows"])


def _operations(results: Results) -> bool | None:
    if not results.operations:
        return None
    loop, masked, _ = results.operations
    fewer = loop["operations"] > FEWER * masked["operations"]
    return fewer and loop["seconds"] > FEWER / 2 * masked["seconds"]


TREE = {
    node: Question(*asked)
    for node, *asked in (
        ("ended", "Did it end by itself?", _late(lambda t: t.finished), "PASS", "moves"),
        ("moves", "Does P move?", _late(lambda t: t.moves), "further", "certified"),
        ("certified", "Is it certified that\nnothing ends its wait?",
         _late(lambda t: t.verdict.kind == "HANG"), "HANG", "STALLED"),
        ("further", "Does it come further\nin twice the time?", _further, "state", "RERUN"),
        ("state", "Is the state alike after\nsteps 4 and 5?", _same_state, "operations", "LEAK"),
        ("operations", "Do operations\nexplain the time?", _operations, "DISPATCH", "ELSEWHERE"),
    )
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
    return LEAVES.get(last, f"INCONCLUSIVE: no evidence for {last!r}")


@dataclass(frozen=True)
class Reason:
    """One rule of GO or NO-GO."""

    rule: str
    holds: bool
    because: str

    def __str__(self) -> str:
        return f"{verdict([self])}: {self.rule}; {self.because}"


def go(results: Results) -> list[Reason]:
    """Whether the case study's training could have started, rule by rule."""
    stand = ("HANG", "STALLED")
    ran, hung = len(results.trials), sum(t.verdict.kind in stand for t in results.trials)
    step5, best_us = TIMINGS[-1], BAND_US[0]
    rate = 1e6 * step5.tokens / (step5.operations * best_us)
    defects = design(results.lab.setup.design).defects
    allow = f"{step5.operations:,} operations a step at {best_us:g} us, the least seen, allow"
    return [
        Reason("nothing hangs", not hung, f"{ran} trials, of which {hung} stand still"),
        Reason(f"at least {TARGET:g} tokens/s", rate >= TARGET, f"{allow} {rate:.0f}"),
        Reason("attention is attention", not defects, f"it has {', '.join(defects) or 'none'}"),
    ]


def verdict(reasons: list[Reason]) -> str:
    """GO only if every rule holds."""
    return "GO" if all(reason.holds for reason in reasons) else "NO-GO"
