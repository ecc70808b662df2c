"""Hung, slow, wrong or sound: a decision tree, and GO or NO-GO, of evidence that runs stored.

Two subjects: the case study's loop, rebuilt, and today's system. Every answer is read from claims
and rows of stored runs and says where; the same runs give the same answers.
"""

from dataclasses import dataclass, replace

from nsa.experiments.case_study import answers
from nsa.experiments.case_study.answers import NOTHING, Answer, Ask, all_hold, negated, of_late
from nsa.experiments.case_study.figures import TARGET_TOKENS_PER_S
from nsa.workbook.identity import PACKAGE
from nsa.workbook.results import Stored, open_stored
from nsa.workbook.store import Run

RIGHT = "attention is attention"  # the rule that other code makes stale
SUBJECTS = {"loop": "the case study's loop, rebuilt", "today": "today's system"}
RUNS = PACKAGE.parent / "runs"
# The commands whose runs hold the evidence.
LOOP = "nsa run 03 -f notebooks/params/03_h200.yaml"
RANKS2 = "nsa run 05 -f notebooks/params/05_h200x2.yaml"
TRIAL = "nsa trial preset=production tokens=2048 steps=20"
SIZED = {
    "loop": "nsa run 03 -f notebooks/params/03_production.yaml",
    "today": (
        "nsa run 01 -f notebooks/params/h200.yaml; nsa run 04 -f notebooks/params/04_h200.yaml"
    ),
}


@dataclass(frozen=True)
class Question:
    """A node: what is asked, what follows either answer, and how it is read for each subject.

    wants: the command whose run would answer for today's system; for the loop that is LOOP.
    """

    text: str
    yes: str
    no: str
    wants: str
    today: Ask | None = None
    loop: Ask | None = None

    def answer(self, stored: Stored, subject: str) -> Answer:
        ask = {"today": self.today, "loop": self.loop}[subject]
        return ask(stored) if ask else NOTHING

    def provided_by(self, subject: str) -> str:
        return LOOP if subject == "loop" else self.wants


@dataclass(frozen=True)
class Leaf:
    """A conclusion; `then`: the question that comes after one that is not the end."""

    text: str
    then: str = ""


LEAVES = {
    "PASS": Leaf("PASS: it ends by itself", "differ"),
    "HANG": Leaf("HANG: nobody is left who could end its wait"),
    "STALLED": Leaf("STALLED, or SLOW uncounted: its page says why"),
    "RERUN": Leaf("INCONCLUSIVE: it moves and comes no further; rerun it"),
    "LEAK": Leaf("FAIL: something grows from step to step"),
    "ELSEWHERE": Leaf("SLOW: profile it, dispatch is not the cause", "differ"),
    "DISPATCH": Leaf("SLOW: as many operations as the loop has tokens", "differ"),
    "INVALID": Leaf("INVALID: the arms ran one program, so they compare nothing"),
    "WRONG": Leaf("FAIL: it computes something else; mend that before its speed"),
    "STATIC": Leaf("FAIL: a static graph trains something else"),
    "BRANCH": Leaf("FAIL: a branch alone lacks gradients; look at that one"),
    "MISSING": Leaf("FAIL: gradients are missing; the arrival list names them"),
    "TRANSPORT": Leaf("FAIL: only under one of NCCL and gloo"),
    "VERSION": Leaf("FAIL: only under one version of torch"),
    "SOUND": Leaf("PASS: none of the five has a part in it"),
}

ALONE = [("05", f"{branch} alone: ") for branch in ("cmp", "slc", "win")]

TREE = {
    # Does anything stand still?
    "ended": Question(
        "Did it end by itself?", "PASS", "moves", "nsa run 05; nsa run 04",
        all_hold(*answers.ENDED), of_late(lambda trial: trial["old_rule"] == "PASS"),
    ),
    "moves": Question(
        "Is it progressing?", "further", "certified", TRIAL,
        loop=of_late(lambda trial: trial["verdict"] == "SLOW"),
    ),
    "certified": Question(
        "Is it certified that\nnothing ends its wait?", "HANG", "STALLED", TRIAL,
        loop=of_late(lambda trial: trial["verdict"].startswith("HANG")),
    ),
    "further": Question(
        "Does it come further\nin twice the time?", "state", "RERUN", TRIAL,
        loop=answers.further,
    ),
    "state": Question(
        "Is the state alike after\nsteps 4 and 5?", "operations", "LEAK", TRIAL,
        loop=all_hold(("03", "between steps 4 and 5")),
    ),
    "operations": Question(
        "Do operations\nexplain the time?", "DISPATCH", "ELSEWHERE", TRIAL,
        loop=answers.operations_explain,
    ),
    # Does a comparison mean anything, and is what it computes right?
    "differ": Question(
        "Do the arms differ?", "correct", "INVALID", "nsa run 02; nsa run 04; nsa run 05",
        all_hold(*answers.DIFFER), answers.arms_differ,
    ),
    "correct": Question(
        "Is it correct?", "static", "WRONG", "nsa run 00",
        all_hold(*answers.CORRECT), answers.loop_is_attention,
    ),
    # The five of the reports.
    "static": Question(
        "Does a static graph\nchange it?", "STATIC", "branch", RANKS2,
        negated(all_hold(("05", "a static graph trains the same"), ranks=2)),
    ),
    "branch": Question(
        "Does one branch alone\nlack gradients?", "BRANCH", "missing",
        "nsa run 05 -f notebooks/params/05_branches.yaml", negated(all_hold(*ALONE, ranks=2)),
    ),
    "missing": Question(
        "Are gradients missing?", "MISSING", "gloo", RANKS2,
        negated(all_hold(("05", "ddp: "), ranks=2)),
    ),
    "gloo": Question(
        "Is it otherwise under\ngloo than under NCCL?", "TRANSPORT", "version",
        f"nsa run 05 -p device=cpu; {RANKS2}", answers.transport_matters,
    ),
    "version": Question(
        "Is it otherwise under\nanother torch?", "VERSION", "SOUND",
        "nsa run 05 in an environment with another torch, or nsa run 08 with the factor python",
        answers.version_matters,
    ),
}  # fmt: skip


def evidence(live: Run | None = None) -> Stored:
    """The runs of the checkout; or one alone, which is not over."""
    return Stored([], live) if live else open_stored(RUNS)


@dataclass(frozen=True)
class Decision:
    """The way from the first question to the end: (question, its answer), and the leaves on it.

    missing: the question without an answer at which it broke off, "" for none.
    """

    subject: str
    path: tuple[tuple[str, Answer], ...]
    leaves: tuple[str, ...]
    missing: str = ""

    @property
    def nodes(self) -> list[str]:
        """Questions and leaves in the order in which they were met."""
        met, leaves = [], list(self.leaves)
        for node, answer in self.path:
            met.append(node)
            if answer.holds is not None and (to := _next(node, answer)) in leaves:
                met.append(to)
        return met

    @property
    def conclusion(self) -> str:
        """The leaves in words; what would answer the question that has no answer."""
        told = [LEAVES[leaf].text for leaf in self.leaves]
        if self.missing:
            question = TREE[self.missing]
            text, command = question.text.replace("\n", " "), question.provided_by(self.subject)
            told.append(f"INCONCLUSIVE: nothing stored answers {text!r}; it wants {command}")
        return "; ".join(told)


def _next(node: str, answer: Answer) -> str:
    return TREE[node].yes if answer.holds else TREE[node].no


def decide(stored: Stored, subject: str) -> Decision:
    """The subject's way through the tree; it ends where evidence is missing."""
    path: list[tuple[str, Answer]] = []
    leaves: list[str] = []
    node = "ended"
    while node:
        answer = TREE[node].answer(stored, subject)
        path.append((node, answer))
        if answer.holds is None:
            return Decision(subject, tuple(path), tuple(leaves), node)
        node = _next(node, answer)
        if node in LEAVES:
            leaves.append(node)
            node = LEAVES[node].then
    return Decision(subject, tuple(path), tuple(leaves))


@dataclass(frozen=True)
class Reason:
    """One rule of GO or NO-GO, and its answer; `provide`: the command for one without, or for one
    whose evidence is old; `ages`: how old the runs are that it was read from."""

    rule: str
    answer: Answer
    provide: str
    ages: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.answer.holds is None:
            return f"UNDECIDED: {self.rule}; {self.answer.because}: {self.provide}"
        return f"{verdict([self])}: {self.rule}; {self.answer.because}"


def go(stored: Stored, subject: str) -> list[Reason]:
    """Whether the production training could start on this system, rule by rule."""
    least, most = TARGET_TOKENS_PER_S
    size = f"{answers.LAYERS} layers at T {answers.TOKENS}, batch 1"
    hangs = answers.NO_HANGS if subject == "loop" else (*answers.ENDED, *answers.NO_ALARMS)
    ended, correct = TREE["ended"], TREE["correct"]
    reasons = [
        Reason("nothing hangs", all_hold(*hangs)(stored),
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
    """With the ages of the runs that it was read from. What holds of other code than today's, or of
    nobody knows which, is not known of today's."""
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
