"""The sentences of the step-5 question, each with the ids of its trials and decided by them."""

from itertools import pairwise

from nsa.experiments.case_study.figures import BAND_US, TIMINGS
from nsa.experiments.case_study.step5 import decision, table
from nsa.experiments.case_study.step5.investigation import OBSERVERS, PRINTS, Results
from nsa.experiments.case_study.step5.trials import FACTORS, Trial, pace
from nsa.workbook.claim import Claim, verdict_of

MEMORY_LIMIT = 0.03  # of the case study's own figures
SHAPES_LIMIT = 0.02  # of what is recorded here
CAUSE = {"path": "loop", "deadline": 1.0}
STEADY = 1.3  # a machine whose step varies by more moves deadlines about


def all_claims(results: Results) -> list[Claim]:
    """Every claim; one whose trials are missing or cannot be trusted is INCONCLUSIVE."""
    return [
        nothing_hangs(results),
        the_console_shows_the_schedule(results),
        the_verdict_moves_with_the_deadline(results),
        the_hang_step_moves_with_the_prints(results),
        observers_only_slow(results),
        layers_only_slow(results),
        nothing_builds_up(results),
        the_old_rules_cause(results),
        one_constant_explains_the_times(),
        operations_follow_tokens(results),
        copies_explain_the_memory(),
        recorded_as_predicted(results),
        the_tree_ends_in_slow(results),
    ]


def nothing_hangs(results: Results) -> Claim:
    """What was cut was in motion: SLOW, with P seen moving."""
    cut = [t for t in results.trials if not t.finished]
    hung = [t for t in cut if t.verdict.kind == "HANG"]
    unclear = [t for t in cut if t.verdict.kind not in ("HANG", "SLOW")]
    sentence = f"of {len(cut)} trials that the old rule calls HANG none hangs: each is SLOW"
    evidence = {t.id: [t.verdict.label, *t.verdict.because[:1]] for t in cut}
    if hung:
        return Claim(f"{sentence}; not so: {_ids(hung)}", "FAIL", evidence)
    if unclear or not cut:
        why = f"{_ids(unclear)} cannot be told" if unclear else "none was cut"
        return Claim.undecided(sentence, why, evidence)
    return Claim(f"{sentence} [{_ids(cut)}]", "PASS", evidence)


def the_console_shows_the_schedule(results: Results) -> Claim:
    """Whatever the path, observers or deadline: the console ends where the schedule has it end."""
    told = {t.id: {"last line": t.said, "was in step": t.reached} for t in results.trials}
    wrong = [t for t in results.trials if t.said not in t.expected()]
    sentence = f"the last line of all {len(told)} trials is what their print schedule makes of P"
    return _claim(sentence, results.trials, not wrong, told, f"; not of {_ids(wrong)}")


def the_verdict_moves_with_the_deadline(results: Results) -> Claim:
    """A hang would stay where it is."""
    named = sorted((t for n, t in results.named.items() if n.endswith(" x")),
                   key=lambda t: t.cell["deadline"])  # fmt: skip
    sentence = "the same run comes further with every longer deadline, and ends"
    if len(named) < 2:
        return _undecided(sentence)
    reached = [t.steps + 1 if t.finished else t.reached for t in named]
    done = named[0].steps + 1
    holds = all(a < b or a == b == done for a, b in pairwise(reached))
    told = ", ".join(f"{t.cell['deadline']:g} x: {_where(t)}" for t in named)
    if holds and not named[-1].finished:
        return Claim.undecided(sentence, told, {"reached": reached})
    return _claim(f"{sentence}: {told}", named, holds, {"reached": reached})


def the_hang_step_moves_with_the_prints(results: Results) -> Claim:
    """One deadline, one program; only the printing differs."""
    chosen = {n: t for n, t in results.named.items() if n in PRINTS or n == "1 x"}
    sentence = "the step that is said to hang is chosen by the print schedule"
    if len(chosen) < 2:
        return _undecided(sentence)
    said = {n: t.said for n, t in chosen.items()}
    asked = {n: t.said in t.expected() for n, t in chosen.items()}
    told = ", ".join(f"{n}: {t.said} (in {t.reached})" for n, t in chosen.items())
    holds = all(asked.values()) and len(set(said.values())) > 2
    return _claim(f"{sentence}: {told}", list(chosen.values()), holds, said)


def observers_only_slow(results: Results) -> Claim:
    """A fault would show itself to an observer; slow work only gets slower."""
    watched = {n: t for n, t in results.named.items() if n in OBSERVERS}
    sentence = "aux stats, tracing and launch blocking change the pace and not the verdict"
    if "1 x" not in results.named or not watched:
        return _undecided(sentence)
    plain = results.named["1 x"]
    told = {n: {"was in step": t.reached, "verdict": t.verdict.label} for n, t in watched.items()}
    bad = [t for t in watched.values() if t.verdict.kind not in ("SLOW", "PASS")]
    if any(t.verdict.kind == "INCONCLUSIVE" for t in bad):
        return _undecided(sentence, f"{_ids(bad)} cannot be told")
    said = ", ".join(f"{n} step {t.reached}" for n, t in watched.items())
    return _claim(f"{sentence}: step {plain.reached} without, {said}",
                  [plain, *watched.values()], not bad, told)  # fmt: skip


def layers_only_slow(results: Results) -> Claim:
    """A threshold in layers is one in seconds."""
    found = [(n, t) for n, t in results.named.items() if n.endswith(" layers")]
    sentence = "more layers come less far within one deadline, and move"
    if not found or "1 x" not in results.named:
        return _undecided(sentence)
    name, deep = found[0]
    plain = results.named["1 x"]
    if deep.verdict.kind not in ("SLOW", "HANG"):
        return _undecided(sentence, f"{deep.id} is {deep.verdict.label}")
    holds = deep.verdict.kind == "SLOW" and deep.reached < plain.reached
    return _claim(f"{sentence}: {name} {_where(deep)}, 1 layer {_where(plain)}", [plain, deep],
                  holds, {"reached": [plain.reached, deep.reached]})  # fmt: skip


def nothing_builds_up(results: Results) -> Claim:
    """Between the step that was said to be the last good one and the one said to hang."""
    sentence = "between steps 4 and 5 nothing changes but weights, moments and the step count"
    if results.state is None:
        return _undecided(sentence)
    rows = results.state["rows"]
    wrong = [r["what"] for r in rows if r["changed"] != r["should"]]
    text = f"{sentence}, of {len(rows)} things compared"
    if wrong:
        text += f"; not so: {', '.join(wrong)}"
    return Claim(text, "FAIL" if wrong else "PASS", {"rows": rows})


def the_old_rules_cause(results: Results) -> Claim:
    """What has to be there for a HANG by the old rule, and nothing that could be left out."""
    found = results.bisection
    ids = [row.tried.id for row in found.rows]
    sentence = f"of {len(FACTORS)} factors the old rule's HANG needs the loop and the deadline"
    if not found.solved:
        return _undecided(sentence, found.why)
    cause = dict(found.cause)
    told = ", ".join(f"{name}={value}" for name, value in cause.items())
    text = f"{sentence}: {told}, in {len(ids)} trials [{ids[0]} to {ids[-1]}]"
    evidence = {"cause": cause, "trials": ids, "spread": spread(results)}
    if cause == CAUSE:
        return Claim(text, "PASS", evidence)
    unsteady = spread(results) > STEADY
    return Claim(f"{text}; another cause", "INCONCLUSIVE" if unsteady else "FAIL", evidence)


def one_constant_explains_the_times() -> Claim:
    """Over layers, lengths, GPUs and versions of torch."""
    each = [t.microseconds for t in TIMINGS]
    seconds = [t.seconds for t in TIMINGS]
    low, high = BAND_US
    return Claim(
        f"all {len(each)} timings of the case study are {min(each):.1f} to {max(each):.1f} us an "
        f"operation, though their seconds differ {max(seconds) / min(seconds):.0f}-fold",
        verdict_of(all(low < us < high for us in each)),
        {str(t): round(t.microseconds, 1) for t in TIMINGS},
    )


def operations_follow_tokens(results: Results) -> Claim:
    """The loop's by the token, the masks' not at all."""
    rows = {(row["path"], row["tokens"]): row["operations"] for row in results.operations}
    tokens = results.lab.setup.tokens
    sentence = "the loop dispatches by the token, dense masks do not"
    keys = ("loop", tokens), ("masked", tokens), ("masked", 2 * tokens)
    if any(key not in rows for key in keys):
        return _undecided(sentence)
    loop, masked, longer = (rows[key] for key in keys)
    holds = loop > 20 * masked and longer == masked
    times = f"{loop / masked:.0f} times as many operations at T {tokens}"
    return Claim(f"{sentence}: {times}", verdict_of(holds), {str(k): rows[k] for k in keys})


def copies_explain_the_memory() -> Claim:
    """From shapes, with nothing fitted."""
    errors = table.memory()["error"]
    worst = float(errors.abs().max())
    return Claim(
        f"shapes alone give the case study's memory table, 5 and 12 layers, to {worst:.1%}",
        verdict_of(worst <= MEMORY_LIMIT),
        {f"{layers} layers, T {tokens}": f"{error:+.1%}"
         for (layers, tokens), error in errors.items()},
    )  # fmt: skip


def recorded_as_predicted(results: Results) -> Claim:
    """Peaks of this machine's allocator, against the same count."""
    sentence = "what the exhibit holds is what its shapes say"
    if not results.memory:
        return _undecided(sentence)
    errors = table.recorded(results)["error"]
    worst = float(errors.abs().max())
    on_gpu = results.lab.setup.device == "cuda"
    limit = MEMORY_LIMIT if on_gpu else SHAPES_LIMIT  # blocks of 512 bytes, fused norms
    told = {f"{n} layers, T {t}": f"{e:+.2%}" for (n, t), e in errors.items()}
    return Claim(f"{sentence}, to {limit:.0%}: {worst:.2%}", verdict_of(worst <= limit), told)


def the_tree_ends_in_slow(results: Results) -> Claim:
    """The executable decision, from the same evidence."""
    path = decision.decide(results)
    leaf = path[-1][0]
    trials = [results.named[n] for n in ("1 x", "2 x") if n in results.named]
    sentence = "the decision tree ends in SLOW by dispatch"
    if leaf in decision.TREE:
        return _undecided(sentence, f"nothing answers {leaf!r}")
    told = " > ".join(f"{n}: {'yes' if a else 'no'}" for n, a in path[:-1])
    if leaf == "PASS" and spread(results) > STEADY:
        return _undecided(sentence, "the machine's pace changed under it")
    return _claim(f"{sentence}: {told}", trials, leaf == "DISPATCH", {"leaf": leaf})


def spread(results: Results) -> float:
    """How much a step's time varied over trials of the same program."""
    alike = [t for t in results.trials if t.cell["path"] == "loop" and t.cell["layers"] == 1
             and not any(t.cell[n] for n in ("tracing", "aux_stats", "blocking"))]  # fmt: skip
    paces = [p for p in (pace(t.evidence) for t in alike) if p]
    return max(paces) / min(paces) if len(paces) > 1 else 1.0


def _where(trial: Trial) -> str:
    return f"{trial.steps} steps done" if trial.finished else f"in step {trial.reached}"


def _claim(sentence: str, trials: list[Trial], holds: bool, evidence, otherwise: str = "") -> Claim:
    text = f"{sentence}{'' if holds else otherwise} [{_ids(trials)}]"
    ids = list(dict.fromkeys(t.id for t in trials))
    return Claim(text, verdict_of(holds), {"trials": ids, "found": evidence})


def _ids(trials: list[Trial], most: int = 6) -> str:
    """The first of them; all are in the claim's evidence."""
    ids = list(dict.fromkeys(t.id for t in trials))
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(ids[:most]) + more


def _undecided(sentence: str, why: str = "it was not run") -> Claim:
    return Claim.undecided(sentence, why)
