"""Claims of the step-5 question, each with the ids of its trials and decided by them."""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import mean
from typing import Any

from workbook.rooms.case_study.answers import SAME
from workbook.rooms.case_study.decision import Decision
from workbook.rooms.case_study.figures import OFF, PEAKS_MIB, PER_LAYER
from workbook.rooms.case_study.loop.design import peak_mib
from workbook.rooms.case_study.step5.trials import (
    FACTORS,
    OBSERVERS,
    PRINTS,
    Results,
    Trial,
    pace,
)
from workbook.runs.claim import Claim, Undecided, claim

MEMORY_LIMIT = 0.03  # for the case study's own figures
SHAPES_LIMIT = 0.02  # for peaks recorded here
CAUSE = {"path": "loop", "deadline": 1.0}
STEADY = 1.3  # on a machine whose steps vary by more, deadlines are unreliable
NONE_HANGS = "of {} trials that the old rule calls HANG none hangs: each is SLOW, moving"
LAST_LINES = "the last line of all {} trials is what their print schedule makes of P"
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


@claim(lambda results: NONE_HANGS.format(len(_cut(results))))
def nothing_hangs(results: Results):
    """Trials that were cut were moving: SLOW, with P seen to advance."""
    cut = _cut(results)
    stand = [t for t in cut if t.verdict.kind in ("HANG", "STALLED")]
    unclear = [t for t in cut if t not in stand and not t.moves]
    evidence = {t.id: [t.verdict.label, *t.verdict.because[:1]] for t in cut}
    if stand:
        return f"; not so: {_ids(stand)}", False, evidence
    if unclear or not cut:
        why = f"{_ids(unclear)} cannot be judged" if unclear else "none was cut"
        raise Undecided(why, evidence)
    return f" [{_ids(cut)}]", True, evidence


def _cut(results: Results) -> list[Trial]:
    return [t for t in results.trials if not t.finished]


@claim("the same loop with a lock planted at step 5 is HANG, certified at its line")
def a_planted_hang_is_told_apart(results: Results):
    """A planted hang is detected; else the absence of hangs would mean nothing."""
    planted = results.planted
    if planted is None or planted.verdict.kind == "INCONCLUSIVE":
        raise Undecided(f"it is {planted.verdict.label}" if planted else NOT_RUN)
    found = planted.verdict
    named = found.label == "HANG:lock" and "taken_twice" in found.line
    holds = named and bool(found.edges) and planted.reached == 5
    told = f"{found.label}, {found.line}, in step {planted.reached}"
    return _by(told, [planted], holds, {"because": list(found.because), "edges": found.edges})


@claim(lambda results: LAST_LINES.format(len(results.trials)))
def the_console_shows_the_schedule(results: Results):
    """The console ends at its schedule's line for P, whatever the path, observers or deadline."""
    seen = {t.id: {"last line": t.said, "was in step": t.reached} for t in results.trials}
    wrong = [t for t in results.trials if t.said not in t.expected()]
    told = f"; not of {_ids(wrong)}" if wrong else ""
    return _by(told, results.trials, not wrong, seen)


@claim("the same run comes further with every longer deadline, and ends")
def the_verdict_moves_with_the_deadline(results: Results):
    """Longer deadlines let the run get further; a hang would stay at its step."""
    named = [t for n, t in results.named.items() if n.endswith(" x")]
    named.sort(key=lambda t: t.cell["deadline"])
    if len(named) < 2:
        raise Undecided(NOT_RUN)
    reached = [t.steps + 1 if t.finished else t.reached for t in named]
    done = named[0].steps + 1
    holds = all(a < b or a == b == done for a, b in pairwise(reached))
    told = ", ".join(f"{t.cell['deadline']:g} x: {_where(t)}" for t in named)
    so_far = {"trials": [t.id for t in named], "found": {"reached": reached}}
    if holds and not named[-1].finished:
        raise Undecided(told, so_far)
    if not holds and results.spread > STEADY:  # a standstill is decided by `nothing_hangs`
        raise Undecided(f"{UNSTEADY}, {told}", so_far)
    return _by(told, named, holds, {"reached": reached})


@claim("the step that is said to hang is chosen by the print schedule")
def the_hang_step_moves_with_the_prints(results: Results):
    """Compare trials with one deadline and one program, in which only the printing differs."""
    chosen = {n: t for n, t in results.named.items() if n in PRINTS or n == "1 x"}
    if len(chosen) < 2:
        raise Undecided(NOT_RUN)
    said = {n: t.said for n, t in chosen.items()}
    told = ", ".join(f"{n}: {t.said} (in {t.reached})" for n, t in chosen.items())
    holds = all(t.said in t.expected() for t in chosen.values())
    if holds and len(set(said.values())) < 3:  # on a busy machine
        raise Undecided("too few steps tell the schedules apart", said, told)
    lost = [name for name in PRINTS if name not in chosen]
    return _by(told, [*chosen.values()], holds, said, lost)


@claim("no verdict changes under aux stats, tracing or launch blocking")
def observers_only_slow(results: Results):
    """Observers would reveal a fault, but only slow down slow work. Single trials show no
    difference in pace below the spread of trials of one program."""
    plain = results.named.get("1 x")
    watched = {n: t for n, t in results.named.items() if n in OBSERVERS}
    if not plain or not watched:
        raise Undecided(NOT_RUN)
    seen = {n: {"was in step": t.reached, "verdict": t.verdict.label} for n, t in watched.items()}
    bad = [t for t in watched.values() if t.verdict.kind not in ("SLOW", "PASS")]
    if any(t.verdict.kind == "INCONCLUSIVE" for t in bad):
        raise Undecided(f"{_ids(bad)} cannot be judged")
    times = ", ".join(f"{name} {_times(t, plain)}" for name, t in watched.items())
    told = f"; a step, of {plain.id}'s: {times}"
    told += f"; trials of one program differ by {results.spread:.2f}"
    lost = [name for name in OBSERVERS if name not in watched]
    return _by(told, [plain, *watched.values()], not bad, seen, lost)


def _times(trial: Trial, plain: Trial) -> str:
    one, other = pace(trial.evidence), pace(plain.evidence)
    return f"{one / other:.2f}" if one and other else "unknown"


@claim("more layers come less far within one deadline, and move")
def layers_only_slow(results: Results):
    """More layers only make the loop slower: a threshold in layers is one in seconds."""
    plain = results.named.get("1 x")
    name = next((n for n in results.named if n.endswith(" layers")), None)
    if not plain or not name:
        raise Undecided(NOT_RUN)
    deep = results.named[name]
    if deep.verdict.kind not in ("SLOW", "STALLED", "HANG"):
        raise Undecided(f"{deep.id} is {deep.verdict.label}")
    holds = deep.moves and deep.reached < plain.reached
    told = f"{name} {_where(deep)}, 1 layer {_where(plain)}"
    return _by(told, [plain, deep], holds, {"reached": [plain.reached, deep.reached]})


@claim("between steps 4 and 5 nothing changes but weights, moments and the step count")
def nothing_builds_up(results: Results):
    """Compare the step reported as the last good one with the one reported to hang."""
    if results.state is None:
        raise Undecided(NOT_RUN)
    rows = results.state["rows"]
    wrong = [r["what"] for r in rows if r["changed"] != r["should"]]
    told = f"; not so: {', '.join(wrong)}" if wrong else ""
    return f", of {len(rows)} things compared{told}", not wrong, {"rows": rows}


@claim(f"of {len(FACTORS)} factors the old rule's HANG needs the loop and the deadline")
def the_old_rules_cause(results: Results):
    """Smallest cause of a HANG by the old rule: all factors that it needs, and no others."""
    found = results.bisection
    if not found.solved:
        raise Undecided(found.why)
    ids, cause = [row.tried.id for row in found.rows], dict(found.cause)
    told = ", ".join(f"{name}={value}" for name, value in cause.items())
    told += f", in {len(ids)} trials [{ids[0]} to {ids[-1]}]"
    evidence = {"cause": cause, "trials": ids, "spread": results.spread}
    if cause != CAUSE:
        told += "; another cause"
        if results.spread > STEADY:
            raise Undecided(UNSTEADY, evidence, told)
    return told, cause == CAUSE, evidence


@claim("operations and one constant explain")
def one_constant_explains_the_times():
    """Predict each known timing by the constant of all others; outliers are named, not left out.

    The share is of the variance of log seconds. The claim that every timing lies within 25 % is
    separate, P1 of the settlement. Operations were counted in that code, with no record here.
    """
    logs = [math.log(t.seconds) for t in OFF]
    left = sum(math.log1p(error) ** 2 for error in OFF.values())
    share = 1 - left / sum((log - mean(logs)) ** 2 for log in logs)
    far = [f"{t} {error:+.0%}" for t, error in OFF.items() if abs(error) > 0.25]
    told = f" {share:.0%} of how far the {len(OFF)} known timings lie apart, {len(OFF) - len(far)} "
    told += f"of them to 25 %; not {' and '.join(far) or 'one'}"
    return told, share >= 0.9, {f"{t}: {t.said}": f"{error:+.0%}" for t, error in OFF.items()}


@claim("the loop dispatches by the token, dense masks do not")
def operations_follow_tokens(results: Results):
    """Operations of the loop grow with every token, those of dense masks do not."""
    if not results.operations:
        raise Undecided(NOT_RUN)
    rows = {(row["path"], row["tokens"]): row["operations"] for row in results.operations}
    loop, masked, longer = rows.values()
    setup = results.lab.setup
    times = f"{loop / masked:.0f} times as many operations at T {setup.tokens}"
    if quoted := PER_LAYER.get((setup.design, setup.tokens)):
        times += f", {loop:,} where {quoted:,} were counted in the case study's own code"
    holds = loop > 20 * masked and longer == masked
    return times, holds, {str(k): n for k, n in rows.items()}


@claim("shapes alone give the case study's memory table, 5 and 12 layers")
def copies_explain_the_memory():
    """Compare shapes with the memory table, with nothing fitted."""
    errors = {size: peak_mib(*size) / mib - 1 for size, mib in PEAKS_MIB.items()}
    worst = max(map(abs, errors.values()))
    return f", to {worst:.1%}", worst <= MEMORY_LIMIT, _by_size(errors, "+.1%")


@claim("what the exhibit holds is what its shapes say")
def recorded_as_predicted(results: Results):
    """Compare peaks of this machine's allocator with the count from shapes."""
    if not results.memory:
        raise Undecided(NOT_RUN)
    errors = {
        (r["layers"], r["tokens"]): r["peak_mib"] / r["predicted_mib"] - 1 for r in results.memory
    }
    worst = max(map(abs, errors.values()))
    on_gpu = results.lab.setup.device == "cuda"
    limit = MEMORY_LIMIT if on_gpu else SHAPES_LIMIT  # blocks of 512 bytes, fused norms
    return f", to {limit:.0%}: {worst:.2%}", worst <= limit, _by_size(errors, "+.2%")


@claim("the loop's attention is not NSA's, and is without its defects")
def it_is_another_attention(results: Results):
    """Compare with the reference in fp64: all that is wrong with the loop is its defects."""
    if len(results.attention) < 2:
        raise Undecided(NOT_RUN)
    was, right = (row["error"] for row in results.attention)
    told = f"off by {was:.2g} of the largest output, without them by {right:.0e}"
    return told, was > SAME >= right, {"rows": results.attention}


@claim("the decision tree says of the loop: slow by dispatch, and wrong")
def the_tree_ends_in_slow(results: Results, decided: Decision):
    """Apply the executable decision to this run's own rows and claims."""
    if decided.missing:
        raise Undecided(f"nothing answers {decided.missing!r}")
    if decided.leaves[0] in ("PASS", "RERUN") and results.spread > STEADY:
        raise Undecided(UNSTEADY)
    trials = [results.named[n] for n in ("1 x", "2 x") if n in results.named]
    told = " > ".join(f"{n}: {'yes' if a.holds else 'no'}" for n, a in decided.path)
    holds = decided.leaves == ("DISPATCH", "WRONG")
    return _by(told, trials, holds, {"leaves": decided.leaves})


def _where(trial: Trial) -> str:
    return f"{trial.steps} steps done" if trial.finished else f"in step {trial.reached}"


def _by_size(errors: Mapping[tuple[int, int], float], form: str) -> dict[str, str]:
    return {f"{n} layers, T {t}": f"{error:{form}}" for (n, t), error in errors.items()}


def _by(told: str, trials: list[Trial], holds: bool, evidence: Any, lost: Iterable[str] = ()):
    """Result of a rule that these trials decide: their ids follow what it found."""
    ids = list(dict.fromkeys(t.id for t in trials))
    return f"{told} [{_ids(trials)}]", holds, {"trials": ids, "found": evidence}, lost


def _ids(trials: list[Trial], most: int = 6) -> str:
    """First ids of the trials; all are in the claim's evidence."""
    ids = list(dict.fromkeys(t.id for t in trials))
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(ids[:most]) + more
