"""`nsa trial`, `trial sweep`, `bisect` and `explain`: supervised trials, plans and verdicts."""

import signal
import sys
from contextlib import contextmanager
from pathlib import Path

from nsa.spelling import settings
from workbook.cli.options import FAILED, GOOD, command, import_from_here, share, words

# Settings of the trial itself and not of its subject.
OF_THE_PLAN = (
    *("subject", "steps", "deadline_s", "predicted_s", "stall_s", "on_hang", "on_stall"),
    *("calibrate", "oracles"),
)


def add(commands) -> None:
    """Add the parsers."""
    made = command(commands, trial)
    text = f"a factor of the subject, or {', '.join(OF_THE_PLAN)}"
    made.add_argument("settings", nargs="*", metavar="KEY=VALUE", help=text)
    made.add_argument("--factors", action="store_true", help="list the factors and end")
    text = (
        "who holds the memory of this step, counted from 0 (by default 1, the second); as "
        "memory_snapshot=STEP"
    )
    made.add_argument("--memory-snapshot", nargs="?", const="1", metavar="STEP", help=text)
    share(made, "--trials", "--again")

    made = command(commands, sweep, "plan", "--budget", under="trial")
    text = "also on several GPUs, which else have a trial each: those share a host"
    made.add_argument("--one-at-a-time", action="store_true", help=text)
    made.add_argument("--list", action="store_true", help="tell what would be run, and end")
    share(made, "--trials", "--again")

    command(commands, bisect, "plan", "--budget", "--trials")

    made = command(commands, explain)
    text = "id, its beginning, its folder, or latest"
    made.add_argument("trial", nargs="?", metavar="TRIAL", help=text)
    text = "instead of a trial: hung, slow, wrong or sound, and GO or NO-GO, from all stored runs"
    made.add_argument("--decide", action="store_true", help=text)
    made.add_argument("--markdown", action="store_true", help="as markdown, for a notebook")
    made.add_argument("--again", action="store_true", help="judge it again, by today's rules")
    share(made, "--trials", "--runs")


def trial(arguments) -> int:
    """Run one trial under supervision and judge it. Exit code 0 if it passed. subject=train.py runs
    a script unchanged, with argv='--lr 0.1' and ranks=2 under torchrun; subject=package.module:make
    names any maker of steps; the default is a training step of this package: layers=2
    backend=gather tokens=256. A hang or stall is reported at once, and the trial is ended only with
    on_hang=kill or on_stall=kill."""
    from workbook.lab.search.candidates import Spent
    from workbook.lab.search.execute import Trials
    from workbook.lab.search.factors import listed
    from workbook.lab.search.ledger import Ledger
    from workbook.lab.search.plan import Plan

    if arguments.factors:
        print(listed())
        return GOOD
    import_from_here()
    step = arguments.memory_snapshot
    if step is not None:  # before a setting it has no number of its own
        said = [step, "memory_snapshot=1"] if "=" in step else [f"memory_snapshot={step}"]
        arguments.settings = [*arguments.settings, *said]
    given = settings(arguments.settings, "layers=2")
    whole = {"on_hang": "report"}
    whole |= {name: given.pop(name) for name in OF_THE_PLAN if name in given}
    if isinstance(whole.get("oracles"), str):
        whole["oracles"] = words(whole["oracles"])
    try:
        ledger, plan = Ledger(arguments.trials), Plan({}, settings=given, **whole)
        if "steps" in whole and plan.spec({}).steps is None:
            raise ValueError(f"steps={plan.steps}: {plan.subject} is a script, which has its own")
        trials = Trials(plan, ledger, tell=_tell, again=arguments.again)
        with _interrupts(trials.stop):
            done = trials.run({})
    except Spent as spent:
        more = "; more: nsa explain latest" if trials.stop.is_set() else ""
        print(f"nsa: {spent}{more}", file=sys.stderr)
        return FAILED
    print(f"{done.verdict.label}  trial {done.id}{'  (was there)' if done.cached else ''}")
    for sentence in (*done.verdict.because, done.calibrated, f"more: nsa explain {done.id}"):
        if sentence:
            print(f"  {sentence}")
    _tell_memory(ledger.root / done.id)
    return GOOD if done.verdict.kind == "PASS" else FAILED


def _tell_memory(folder: Path) -> None:
    """Print the pages of memory snapshots, each with the path of its picture."""
    for page in sorted(folder.glob("memory-rank*.txt")):
        print(f"\n{page.read_text()}", end="")
        if (record := page.with_suffix(".json")).is_file():
            from workbook.runs import timeline

            picture = timeline.drawn(record)
            print(f"  picture  {picture}\n  all rows {page.with_suffix('.csv')}")


@contextmanager
def _interrupts(stop):
    """Let Ctrl-C end the trial and keep its page; a second one ends everything at once."""

    def once(*_) -> None:
        signal.signal(signal.SIGINT, before)
        stop.set()

    before = signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _tell(report) -> None:
    """Print a hang or stall at once in plain words, or its withdrawal."""
    moves = report["withdrawn"] is not None
    said = f"it moves again: {report['label']} is withdrawn" if moves else report["headline"]
    print(f"nsa: {said}", file=sys.stderr, flush=True)


def sweep(arguments) -> int:
    """Run the trials of a plan, a YAML file (for notebooks use `nsa batch`). Finished trials are
    not repeated, so the same command continues an interrupted sweep. Exit code 0 if all ran and
    passed."""
    from workbook.lab.search import execute
    from workbook.lab.search.candidates import text
    from workbook.lab.search.ledger import Ledger

    def say(done) -> None:
        cell = ", ".join(f"{name}={value}" for name, value in done.cell.items())
        again = " (was there)" if done.cached else ""
        print(f"{done.id} {done.verdict.label}{again}: {cell}", file=sys.stderr, flush=True)

    plan = plan_from(arguments.plan)
    cells = list(plan.cells())
    if arguments.list:
        print(text(cells))
        print(f"{len(cells)} trials of {plan.size():,} combinations")
        return GOOD
    gpus = None if arguments.one_at_a_time else gpus_of(plan)
    ledger = Ledger(arguments.trials)
    options = {"budget_s": arguments.budget, "again": arguments.again}
    swept = execute.sweep(plan, ledger, gpus=gpus, say=say, **options)
    rows = [
        {"trial": done.id, "verdict": done.verdict.label}
        | done.cell
        | {"seconds": f"{done.evidence.seconds:.1f}"}
        for done in swept.done
    ]
    print(text(rows))
    for number, verdict in swept.flaky.items():
        print(f"trial {swept.done[number].id} and its repeats: {verdict.label}")
        print("".join(f"  {sentence}\n" for sentence in verdict.because), end="")
    for one, other in swept.invalid:
        print(f"INVALID: {one.id} and {other.id} ran the same code; they compare nothing")
    if swept.not_run:
        print(
            f"{len(swept.not_run)} of {len(cells)} cells not run: {swept.why}; "
            "the same command goes on"
        )
    passed = all(done.verdict.kind == "PASS" for done in swept.done)
    return GOOD if passed and not (swept.not_run or swept.flaky or swept.invalid) else FAILED


def bisect(arguments) -> int:
    """Find the smallest set of a plan's factors that causes a fault, or the threshold of one.
    Prints the ledger: trial, hypothesis, verdict, what it eliminated. Exit code 0 if a cause was
    found."""
    from workbook.lab.search import execute
    from workbook.lab.search.candidates import table, text
    from workbook.lab.search.ledger import Ledger

    def say(row) -> None:
        print(f"{row.number:3} {row.tried}: {row.changed}", file=sys.stderr, flush=True)

    plan, ledger = plan_from(arguments.plan), Ledger(arguments.trials)
    found = execute.bisect(plan, ledger, budget_s=arguments.budget, say=say)
    print(text(table(found.rows)))
    print(found)
    if found.why and found.why not in str(found):
        print(found.why)
    for other in found.others:
        print(f"another fault was seen: {other} (nsa explain {other.id})")
    if found.target is not None:
        print(f"more: nsa explain {found.target.id}")
    return GOOD if found.solved else FAILED


def plan_from(path: str):
    """Plan from a YAML file; parts that cannot run here are listed. ValueError names the file."""
    from workbook.lab.search.plan import Plan
    from workbook.runs.parameters import read_file

    import_from_here()
    content = read_file(path)
    if "jobs" in content:
        raise ValueError(f"{path} is a plan of notebooks: nsa batch {path}")
    try:
        plan = Plan.from_dict(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
    for note in plan.left_out:
        print(f"left out: {note}", file=sys.stderr)
    return plan


def gpus_of(plan):
    """The visible GPUs if any trial of the plan can use one, else None."""
    from whyhung.process import gpus, preflight

    specs = map(plan.spec, plan.cells())
    uses = any(preflight.uses_gpu(spec.settings, spec.env) for spec in specs)
    return gpus.all_visible() if uses else None


def explain(arguments) -> int:
    """Explain a trial: its verdict, the rule that applied, and the evidence that it read. The trial
    is searched among the trials, then in the runs. Exit code 0 if it passed. With --decide, explain
    the case study's loop and today's system; exit code 0 if today's system is GO."""
    if arguments.decide:
        return decide(arguments)
    if arguments.trial is None:
        raise ValueError("which trial? write nsa explain latest, or nsa explain --decide")
    from whyhung.verdict import judge
    from whyhung.verdict.explain import page
    from workbook.lab.search.ledger import Ledger

    given = Path(arguments.trial).resolve()
    if (given / "verdict.json").is_file():
        ledger, name = Ledger(given.parent), given.name
    else:
        ledger, name = _find(arguments.trial, arguments.trials, arguments.runs)
    found = ledger.get(name)
    if found is None:
        raise ValueError(f"trial {name} in {ledger.root} cannot be read")
    evidence, verdict = found
    if arguments.again:
        verdict = judge(evidence)
    print(page(evidence, verdict, name=name, markdown=arguments.markdown), end="")
    return GOOD if verdict.kind == "PASS" else FAILED


def _find(text: str, trials: str, runs: str):
    """Ledger and id of the trial that `text` begins, or the latest; ValueError lists candidates."""
    from workbook.lab.search.ledger import Ledger

    own = Ledger(trials)
    if text in (ids := own.ids()):
        return own, text
    if text == "latest" and ids:
        return own, ids[-1]
    where = dict.fromkeys(ids, own)
    # A kept trial lies beside a run's other folders of trials, which are not in git.
    kept = sorted(Path(runs).glob("*/*/trials/**/verdict.json"), key=lambda f: len(f.parts))
    for file in kept:
        where.setdefault(file.parent.name, Ledger(file.parents[1]))
    if text == "latest" and kept:
        text = max(kept, key=lambda file: file.stat().st_mtime).parent.name
    if not where:
        raise ValueError(f"no trials in {trials} and {runs}; name another folder: --trials")
    found = [text] if text in where else [id for id in where if id.startswith(text)]
    found = [id for id in found if "-" not in id] or found  # not the earlier runs of the same
    if len(found) > 1:
        raise ValueError(f"{text!r} begins {len(found)} trials: {', '.join(found[:5])}; write more")
    if not found:
        ids = list(where)
        places = f"in {trials} and {runs}"
        raise ValueError(
            f"no trial {text!r} among {len(ids)} {places}; the latest are {', '.join(ids[-3:])}"
        )
    return where[found[0]], found[0]


def decide(arguments) -> int:
    """Print the decisions from stored runs on the case study's loop and on today's system."""
    from workbook.rooms.case_study import decision
    from workbook.runs.results import open_stored

    stored = open_stored(arguments.runs)
    for subject, name in decision.SUBJECTS.items():
        decided, rules = decision.decide(stored, subject), decision.go(stored, subject)
        print(f"{name[0].upper()}{name[1:]}: {decision.verdict(rules)}")
        for node, answer in decided.path:
            word = {True: "yes", False: "no", None: "no evidence"}[answer.holds]
            print(f"  {decision.TREE[node].text} {word}: {answer.because}")
            print("".join(f"      {arguments.runs}/{one}\n" for one in answer.where), end="")
        print(f"  = {decided.conclusion}")
        for rule in rules:
            print(f"  {rule}")
            print("".join(f"      evidence {age}\n" for age in rule.ages), end="")
            print("".join(f"      {arguments.runs}/{one}\n" for one in rule.answer.where), end="")
    return GOOD if decision.verdict(rules) == "GO" else FAILED
