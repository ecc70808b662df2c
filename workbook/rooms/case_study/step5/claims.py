"""Claims of the step-5 question, each with the ids of its trials and decided by them."""

import math
from itertools import pairwise
from statistics import mean

from workbook.rooms.case_study.answers import SAME
from workbook.rooms.case_study.decision import Decision
from workbook.rooms.case_study.figures import OFF, PER_LAYER
from workbook.rooms.case_study.step5 import table
from workbook.rooms.case_study.step5.trials import (
    FACTORS,
    OBSERVERS,
    PRINTS,
    Results,
    Trial,
    pace,
)
from workbook.runs.claim import Claim, verdict_of

MEMORY_LIMIT = 0.03  # for the case study's own figures
SHAPES_LIMIT = 0.02  # for peaks recorded here
CAUSE = {"path": "loop", "deadline": 1.0}
STEADY = 1.3  # on a machine whose steps vary by more, deadlines are unreliable
NOT_RUN = "it was not run"
UNSTEADY = "the machine's pace changed under it"


def all_claims(results: Results) -> list[Claim]:
    """Every claim; one whose trials are missing or cannot be trusted is INCONCLUSIVE."""
    return [
        nothing_hangs(results),
        a_planted_hang_is_told_apart(results),
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
        it_is_another_attention(results),
    ]


def nothing_hangs(results: Results) -> Claim:
    """Trials that were cut were moving: SLOW, with P seen to advance."""
    cut = [t for t in results.trials if not t.finished]
    stand = [t for t in cut if t.verdict.kind in ("HANG", "STALLED")]
    unclear = [t for t in cut if t not in stand and not t.moves]
    sentence = f"of {len(cut)} trials that the old rule calls HANG none hangs: each is SLOW, moving"
    evidence = {t.id: [t.verdict.label, *t.verdict.because[:1]] for t in cut}
    if stand:
        return Claim(f"{sentence}; not so: {_ids(stand)}", "FAIL", evidence)
    if unclear or not cut:
        why = f"{_ids(unclear)} cannot be judged" if unclear else "none was cut"
        return Claim.undecided(sentence, why, evidence)
    return Claim(f"{sentence} [{_ids(cut)}]", "PASS", evidence)


def a_planted_hang_is_told_apart(results: Results) -> Claim:
    """A planted hang is detected; else the absence of hangs would mean nothing."""
    sentence = "the same loop with a lock planted at step 5 is HANG, certified at its line"
    planted = results.planted
    if planted is None or planted.verdict.kind == "INCONCLUSIVE":
        return Claim.undecided(sentence, f"it is {planted.verdict.label}" if planted else NOT_RUN)
    found = planted.verdict
    named = found.label == "HANG:lock" and "taken_twice" in found.line
    holds = named and bool(found.edges) and planted.reached == 5
    text = f"{sentence}: {found.label}, {found.line}, in step {planted.reached}"
    return _claim(text, [planted], holds, {"because": list(found.because), "edges": found.edges})


def the_console_shows_the_schedule(results: Results) -> Claim:
    """The console ends at its schedule's line for P, whatever the path, observers or deadline."""
    told = {t.id: {"last line": t.said, "was in step": t.reached} for t in results.trials}
    wrong = [t for t in results.trials if t.said not in t.expected()]
    sentence = f"the last line of all {len(told)} trials is what their print schedule makes of P"
    if wrong:
        sentence += f"; not of {_ids(wrong)}"
    return _claim(sentence, results.trials, not wrong, told)


def the_verdict_moves_with_the_deadline(results: Results) -> Claim:
    """Longer deadlines let the run get further; a hang would stay at its step."""
    named = [t for n, t in results.named.items() if n.endswith(" x")]
    named.sort(key=lambda t: t.cell["deadline"])
    sentence = "the same run comes further with every longer deadline, and ends"
    if len(named) < 2:
        return Claim.undecided(sentence, NOT_RUN)
    reached = [t.steps + 1 if t.finished else t.reached for t in named]
    done = named[0].steps + 1
    holds = all(a < b or a == b == done for a, b in pairwise(reached))
    told = ", ".join(f"{t.cell['deadline']:g} x: {_where(t)}" for t in named)
    so_far = {"trials": [t.id for t in named], "found": {"reached": reached}}
    if holds and not named[-1].finished:
        return Claim.undecided(sentence, told, so_far)
    if not holds and results.spread > STEADY:  # a standstill is decided by `nothing_hangs`
        return Claim.undecided(sentence, f"{UNSTEADY}, {told}", so_far)
    return _claim(f"{sentence}: {told}", named, holds, {"reached": reached})


def the_hang_step_moves_with_the_prints(results: Results) -> Claim:
    """Compare trials with one deadline and one program, in which only the printing differs."""
    chosen = {n: t for n, t in results.named.items() if n in PRINTS or n == "1 x"}
    sentence = "the step that is said to hang is chosen by the print schedule"
    if len(chosen) < 2:
        return Claim.undecided(sentence, NOT_RUN)
    trials = list(chosen.values())
    said = {n: t.said for n, t in chosen.items()}
    told = ", ".join(f"{n}: {t.said} (in {t.reached})" for n, t in chosen.items())
    holds = all(t.said in t.expected() for t in trials)
    if holds and len(set(said.values())) < 3:  # on a busy machine
        return Claim.undecided(
            f"{sentence}: {told}", "too few steps tell the schedules apart", said
        )
    lost = [name for name in PRINTS if name not in chosen]
    return _claim(f"{sentence}: {told}", trials, holds, said).over(lost)


def observers_only_slow(results: Results) -> Claim:
    """Observers would reveal a fault, but only slow down slow work. Single trials show no
    difference in pace below the spread of trials of one program."""
    plain = results.named.get("1 x")
    watched = {n: t for n, t in results.named.items() if n in OBSERVERS}
    sentence = "no verdict changes under aux stats, tracing or launch blocking"
    if not plain or not watched:
        return Claim.undecided(sentence, NOT_RUN)
    told = {n: {"was in step": t.reached, "verdict": t.verdict.label} for n, t in watched.items()}
    bad = [t for t in watched.values() if t.verdict.kind not in ("SLOW", "PASS")]
    if any(t.verdict.kind == "INCONCLUSIVE" for t in bad):
        return Claim.undecided(sentence, f"{_ids(bad)} cannot be judged")
    sentence += f"; a step, of {plain.id}'s: "
    sentence += ", ".join(f"{name} {_times(t, plain)}" for name, t in watched.items())
    sentence += f"; trials of one program differ by {results.spread:.2f}"
    lost = [name for name in OBSERVERS if name not in watched]
    return _claim(sentence, [plain, *watched.values()], not bad, told).over(lost)


def _times(trial: Trial, plain: Trial) -> str:
    one, other = pace(trial.evidence), pace(plain.evidence)
    return f"{one / other:.2f}" if one and other else "unknown"


def layers_only_slow(results: Results) -> Claim:
    """More layers only make the loop slower: a threshold in layers is one in seconds."""
    plain = results.named.get("1 x")
    name = next((n for n in results.named if n.endswith(" layers")), None)
    sentence = "more layers come less far within one deadline, and move"
    if not plain or not name:
        return Claim.undecided(sentence, NOT_RUN)
    deep = results.named[name]
    if deep.verdict.kind not in ("SLOW", "STALLED", "HANG"):
        return Claim.undecided(sentence, f"{deep.id} is {deep.verdict.label}")
    holds = deep.moves and deep.reached < plain.reached
    text = f"{sentence}: {name} {_where(deep)}, 1 layer {_where(plain)}"
    return _claim(text, [plain, deep], holds, {"reached": [plain.reached, deep.reached]})


def nothing_builds_up(results: Results) -> Claim:
    """Compare the step reported as the last good one with the one reported to hang."""
    sentence = "between steps 4 and 5 nothing changes but weights, moments and the step count"
    if results.state is None:
        return Claim.undecided(sentence, NOT_RUN)
    rows = results.state["rows"]
    wrong = [r["what"] for r in rows if r["changed"] != r["should"]]
    text = f"{sentence}, of {len(rows)} things compared"
    if wrong:
        text += f"; not so: {', '.join(wrong)}"
    return Claim(text, verdict_of(not wrong), {"rows": rows})


def the_old_rules_cause(results: Results) -> Claim:
    """Smallest cause of a HANG by the old rule: all factors that it needs, and no others."""
    found = results.bisection
    ids = [row.tried.id for row in found.rows]
    sentence = f"of {len(FACTORS)} factors the old rule's HANG needs the loop and the deadline"
    if not found.solved:
        return Claim.undecided(sentence, found.why)
    cause = dict(found.cause)
    told = ", ".join(f"{name}={value}" for name, value in cause.items())
    text = f"{sentence}: {told}, in {len(ids)} trials [{ids[0]} to {ids[-1]}]"
    evidence = {"cause": cause, "trials": ids, "spread": results.spread}
    if cause == CAUSE:
        return Claim(text, "PASS", evidence)
    unsteady = results.spread > STEADY
    return Claim(f"{text}; another cause", "INCONCLUSIVE" if unsteady else "FAIL", evidence)


def one_constant_explains_the_times() -> Claim:
    """Predict each known timing by the constant of all others; outliers are named, not left out.

    The share is of the variance of log seconds. The claim that every timing lies within 25 % is
    separate, P1 of the settlement. Operations were counted in that code, with no record here.
    """
    logs = [math.log(t.seconds) for t in OFF]
    left = sum(math.log1p(error) ** 2 for error in OFF.values())
    share = 1 - left / sum((log - mean(logs)) ** 2 for log in logs)
    far = [f"{t} {error:+.0%}" for t, error in OFF.items() if abs(error) > 0.25]
    return Claim(
        f"operations and one constant explain {share:.0%} of how far the {len(OFF)} known timings "
        f"lie apart, {len(OFF) - len(far)} of them to 25 %; not {' and '.join(far) or 'one'}",
        verdict_of(share >= 0.9),
        {f"{t}: {t.said}": f"{error:+.0%}" for t, error in OFF.items()},
    )


def operations_follow_tokens(results: Results) -> Claim:
    """Operations of the loop grow with every token, those of dense masks do not."""
    sentence = "the loop dispatches by the token, dense masks do not"
    if not results.operations:
        return Claim.undecided(sentence, NOT_RUN)
    rows = {(row["path"], row["tokens"]): row["operations"] for row in results.operations}
    loop, masked, longer = rows.values()
    setup = results.lab.setup
    holds = loop > 20 * masked and longer == masked
    times = f"{loop / masked:.0f} times as many operations at T {setup.tokens}"
    if quoted := PER_LAYER.get((setup.design, setup.tokens)):
        times += f", {loop:,} where {quoted:,} were counted in the case study's own code"
    return Claim(f"{sentence}: {times}", verdict_of(holds), {str(k): n for k, n in rows.items()})


def copies_explain_the_memory() -> Claim:
    """Compare shapes with the memory table, with nothing fitted."""
    errors = table.memory()["error"]
    worst = float(errors.abs().max())
    sentence = f"shapes alone give the case study's memory table, 5 and 12 layers, to {worst:.1%}"
    return Claim(sentence, verdict_of(worst <= MEMORY_LIMIT), _by_size(errors, "+.1%"))


def recorded_as_predicted(results: Results) -> Claim:
    """Compare peaks of this machine's allocator with the count from shapes."""
    sentence = "what the exhibit holds is what its shapes say"
    if not results.memory:
        return Claim.undecided(sentence, NOT_RUN)
    errors = table.recorded(results)["error"]
    worst = float(errors.abs().max())
    on_gpu = results.lab.setup.device == "cuda"
    limit = MEMORY_LIMIT if on_gpu else SHAPES_LIMIT  # blocks of 512 bytes, fused norms
    text = f"{sentence}, to {limit:.0%}: {worst:.2%}"
    return Claim(text, verdict_of(worst <= limit), _by_size(errors, "+.2%"))


def it_is_another_attention(results: Results) -> Claim:
    """Compare with the reference in fp64: all that is wrong with the loop is its defects."""
    sentence = "the loop's attention is not NSA's, and is without its defects"
    if len(results.attention) < 2:
        return Claim.undecided(sentence, NOT_RUN)
    (was, right), found = (row["error"] for row in results.attention), results.attention
    told = f"off by {was:.2g} of the largest output, without them by {right:.0e}"
    return Claim(f"{sentence}: {told}", verdict_of(was > SAME >= right), {"rows": found})


def the_tree_ends_in_slow(results: Results, decided: Decision) -> Claim:
    """Apply the executable decision to this run's own rows and claims."""
    trials = [results.named[n] for n in ("1 x", "2 x") if n in results.named]
    sentence = "the decision tree says of the loop: slow by dispatch, and wrong"
    if decided.missing:
        return Claim.undecided(sentence, f"nothing answers {decided.missing!r}")
    told = " > ".join(f"{n}: {'yes' if a.holds else 'no'}" for n, a in decided.path)
    if decided.leaves[0] in ("PASS", "RERUN") and results.spread > STEADY:
        return Claim.undecided(sentence, UNSTEADY)
    holds = decided.leaves == ("DISPATCH", "WRONG")
    return _claim(f"{sentence}: {told}", trials, holds, {"leaves": decided.leaves})


def _where(trial: Trial) -> str:
    return f"{trial.steps} steps done" if trial.finished else f"in step {trial.reached}"


def _by_size(errors, form: str) -> dict[str, str]:
    return {f"{n} layers, T {t}": f"{error:{form}}" for (n, t), error in errors.items()}


def _claim(sentence: str, trials: list[Trial], holds: bool, evidence) -> Claim:
    ids = list(dict.fromkeys(t.id for t in trials))
    found = {"trials": ids, "found": evidence}
    return Claim(f"{sentence} [{_ids(trials)}]", verdict_of(holds), found)


def _ids(trials: list[Trial], most: int = 6) -> str:
    """First ids of the trials; all are in the claim's evidence."""
    ids = list(dict.fromkeys(t.id for t in trials))
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(ids[:most]) + more
