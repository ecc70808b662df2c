"""Hung, slow, wrong or sound: a decision tree, and GO or NO-GO, from evidence that runs stored.

Two subjects: the case study's loop, rebuilt, and today's system. Every answer is read from claims
and rows of stored runs and names them; the same runs give the same answers.
"""

from dataclasses import dataclass, replace

from workbook.rooms.case_study import answers
from workbook.rooms.case_study.answers import LIMITS, TOLD, Answer
from workbook.runs.identity import PACKAGE
from workbook.runs.results import Stored, open_stored
from workbook.runs.store import Run

SUBJECTS = {"loop": "the case study's loop, rebuilt", "today": "today's system"}
RUNS = PACKAGE.parent / "runs"


@dataclass(frozen=True)
class Question:
    """Node of the tree, or rule of GO: its text, the nodes after yes and no, and the answer for
    each subject.

    wants, loop_wants: the commands whose runs would answer for today's system and for the loop.
    ages: evidence for today's system from other code than today's decides nothing.
    """

    text: str
    wants: str
    to: tuple[str, str] = ("", "")
    loop_wants: str = TOLD["loop_wants"]
    today: tuple[str, ...] = ()
    loop: tuple[str, ...] = ()
    ages: bool = False

    def answer(self, stored: Stored, subject: str) -> Answer:
        rule = {"today": self.today, "loop": self.loop}[subject]
        return getattr(answers, rule[0])(stored, *rule[1:]) if rule else answers.NOTHING

    def provided_by(self, subject: str) -> str:
        return {"today": self.wants, "loop": self.loop_wants}[subject]


@dataclass(frozen=True)
class Leaf:
    """Conclusion; `then`: the question that follows, if it is not the end."""

    text: str
    then: str = ""


TREE = {name: Question(**one) for name, one in TOLD["tree"].items()}
LEAVES = {name: Leaf(**one) for name, one in TOLD["leaves"].items()}
GO = [Question(**one | {"text": one["text"].format(**LIMITS)}) for one in TOLD["go"]]


def evidence(live: Run | None = None) -> Stored:
    """Runs of the checkout, or only one that has not ended."""
    return Stored([], live) if live else open_stored(RUNS)


@dataclass(frozen=True)
class Decision:
    """Path from the first question to the end: (question, its answer), and the leaves on it.

    missing: the unanswered question at which it broke off, "" for none.
    """

    subject: str
    path: tuple[tuple[str, Answer], ...]
    leaves: tuple[str, ...]
    missing: str = ""

    @property
    def conclusion(self) -> str:
        """Leaves in words, and the command that would answer the missing question."""
        told = [LEAVES[leaf].text for leaf in self.leaves]
        if self.missing:
            asked = TREE[self.missing]
            wants = asked.provided_by(self.subject)
            told.append(f"INCONCLUSIVE: nothing stored answers {asked.text!r}; it wants {wants}")
        return "; ".join(told)


def decide(stored: Stored, subject: str) -> Decision:
    """Path of the subject through the tree; it ends where evidence is missing."""
    path: list[tuple[str, Answer]] = []
    leaves: list[str] = []
    node = "ended"
    while node:
        answer = TREE[node].answer(stored, subject)
        path.append((node, answer))
        if answer.holds is None:
            return Decision(subject, tuple(path), tuple(leaves), node)
        node = TREE[node].to[0 if answer.holds else 1]
        if node in LEAVES:
            leaves.append(node)
            node = LEAVES[node].then
    return Decision(subject, tuple(path), tuple(leaves))


@dataclass(frozen=True)
class Reason:
    """Rule of GO or NO-GO, and its answer; `provide`: the command to run if there is none or its
    evidence is old; `ages`: ages of the runs that it was read from."""

    rule: str
    answer: Answer
    provide: str
    ages: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.answer.holds is None:
            return f"UNDECIDED: {self.rule}; {self.answer.because}: {self.provide}"
        return f"{verdict([self])}: {self.rule}; {self.answer.because}"


def go(stored: Stored, subject: str) -> list[Reason]:
    """Rules for starting the production training on this system, each with its answer."""
    return [_reason(rule, stored, subject) for rule in GO]


def _reason(rule: Question, stored: Stored, subject: str) -> Reason:
    answer = rule.answer(stored, subject)
    folders = {"/".join(where.split("/")[:2]) for where in answer.where}
    ages = [run.age() for run in stored.runs if run.opens(run.folder) in folders]
    stale = rule.ages and subject == "today" and not all(age.fresh for age in ages)
    if stale and answer.holds:
        answer = replace(answer, holds=None, because=f"STALE, {answer.because}")
    told = tuple(dict.fromkeys(map(str, ages)))
    return Reason(rule.text, answer, rule.provided_by(subject), told)


def verdict(reasons: list[Reason]) -> str:
    """NO-GO if a rule is broken, GO if all hold, else UNDECIDED."""
    held = {reason.answer.holds for reason in reasons}
    return "NO-GO" if False in held else "UNDECIDED" if None in held else "GO"
