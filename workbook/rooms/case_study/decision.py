"""Hung, slow, wrong or sound: a decision tree, and GO or NO-GO, from evidence that runs stored.

Two subjects: the case study's loop, rebuilt, and today's system. Every answer is read from claims
and rows of stored runs and names them; the same runs give the same answers.
"""

from dataclasses import dataclass, replace

from workbook.rooms.case_study import answers
from workbook.rooms.case_study.answers import Answer, all_hold
from workbook.rooms.case_study.figures import TARGET_TOKENS_PER_S
from workbook.runs.identity import PACKAGE
from workbook.runs.results import Stored, open_stored
from workbook.runs.store import Run

RIGHT = "attention is attention"  # the rule whose evidence changes of the code make stale
SUBJECTS = {"loop": "the case study's loop, rebuilt", "today": "today's system"}
RUNS = PACKAGE.parent / "runs"


@dataclass(frozen=True)
class Question:
    """Node of the tree: its text, the nodes after yes and no, and the answer for each subject.

    wants: the command whose run would answer for today's system.
    """

    text: str
    to: tuple[str, str]
    wants: str
    today: tuple[str, ...] = ()
    loop: tuple[str, ...] = ()

    def answer(self, stored: Stored, subject: str) -> Answer:
        rule = {"today": self.today, "loop": self.loop}[subject]
        return getattr(answers, rule[0])(stored, *rule[1:]) if rule else answers.NOTHING

    def provided_by(self, subject: str) -> str:
        return LOOP if subject == "loop" else self.wants


@dataclass(frozen=True)
class Leaf:
    """Conclusion; `then`: the question that follows, if it is not the end."""

    text: str
    then: str = ""


# Commands for the evidence.
LOOP, SIZED = (answers.TOLD["commands"][name] for name in ("loop", "sized"))
TREE = {name: Question(**one) for name, one in answers.TOLD["tree"].items()}
LEAVES = {name: Leaf(**one) for name, one in answers.TOLD["leaves"].items()}


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
            question = TREE[self.missing]
            command = question.provided_by(self.subject)
            told.append(
                f"INCONCLUSIVE: nothing stored answers {question.text!r}; it wants {command}"
            )
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
    least, most = TARGET_TOKENS_PER_S
    size = f"{answers.LAYERS} layers at T {answers.TOKENS}, batch 1"
    hangs = ["no hangs"] if subject == "loop" else ["ended", "no alarms"]
    ended, correct = TREE["ended"], TREE["correct"]
    reasons = [
        Reason("nothing hangs", all_hold(stored, *hangs),
               f"{ended.provided_by(subject)}; nsa run 07"),
        Reason(f"below {answers.LIMIT_GIB:g} GiB, alert from {answers.ALERT_GIB:g} on, {size}",
               answers.peak(stored, subject), SIZED[subject]),
        Reason(f"at least {least:g} tokens/s, of a target of {least:g} to {most:g}, {size}",
               answers.speed(stored, subject), SIZED[subject]),
        Reason(RIGHT, correct.answer(stored, subject),
               correct.provided_by(subject)),
    ]  # fmt: skip
    return [
        _aged(one, stored, of_today=one.rule == RIGHT and subject == "today") for one in reasons
    ]


def _aged(reason: Reason, stored: Stored, *, of_today: bool) -> Reason:
    """Add the ages of the runs that it was read from. With `of_today`, a positive answer from other
    code than today's, or from an unknown commit, becomes undecided."""
    folders = {"/".join(where.split("/")[:2]) for where in reason.answer.where}
    runs = [run for run in stored.runs if run.opens(run.folder) in folders]
    answer, ages = reason.answer, tuple(dict.fromkeys(str(run.age()) for run in runs))
    if of_today and answer.holds and not all(run.age().fresh for run in runs):
        answer = replace(answer, holds=None, because=f"STALE, {answer.because}")
    return replace(reason, answer=answer, ages=ages)


def verdict(reasons: list[Reason]) -> str:
    """NO-GO if a rule is broken, GO if all hold, else UNDECIDED."""
    held = {reason.answer.holds for reason in reasons}
    return "NO-GO" if False in held else "UNDECIDED" if None in held else "GO"
