"""Claims of the soak notebook, each decided by rows and never by hand."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nsa.model import saving
from workbook.rooms.soak import table
from workbook.rooms.soak.trials import PROCESSES, USUAL, Estimated, Part, Setting, Soak, told
from workbook.runs.claim import Claim, NotHere, Undecided, aim, claim
from workbook.runs.rules import NOT_OF_THIS_RUN

SPEED_SHARE = 0.01  # of tokens a second at the start
LOSS_APART = 1e-3  # nats between allocator settings
WITHIN = 1  # steps between a limit's crossing and the guard's action
SAME_SHARE = 0.001  # of the memory requested by tensors
RESERVED_SHARE = 0.1
SLOWER = 1.1  # times the usual setting's step
EXPANDABLE = "expandable_segments:True"
GROWS, JUMPS, SMALL = "grows", "by jumps and not by steps", "which is too little to tell"
LOST = ("crash", "timeout", "not run")  # outcomes that say nothing about the training


def all_claims(
    soak: Soak, planted: Part, trials: Sequence[Setting], estimated: Sequence[Estimated]
) -> list[Claim]:
    """All claims."""
    return [
        comes_to_its_end(soak),
        *(memory_does_not_grow(soak, series) for series in table.SERIES),
        speed_does_not_drift(soak),
        goes_on_after_the_restart(soak),
        limits_stop_a_run(planted),
        evidence_is_kept(planted),
        settings_ask_for_the_same(soak, trials),
        expandable_segments_waste_less(soak, trials),
        no_setting_is_slow(soak, trials),
        reserved_is_estimated(soak, trials, estimated),
    ]


@claim("{soak.steps} steps come to their end, with a restart before step {soak.half}")
def comes_to_its_end(soak: Soak):
    """Claim that the soak completes; a process that was killed or had no time decides nothing."""
    evidence, last = {"processes": [part.outcome for part in soak.parts]}, soak.parts[-1]
    if soak.whole:
        return "", True, evidence
    if last.ended.status in LOST:
        raise Undecided(last.outcome, evidence)
    if last.outcome == "ok":  # there is no second
        raise Undecided(f"no checkpoint: {last.result['saved']}", evidence)
    return f"; {last.outcome}", False, evidence


@claim(lambda soak, series: f"{table.SERIES[series][1]} does not grow from step to step")
def memory_does_not_grow(soak: Soak, series: str):
    """Claim that memory does not rise steadily and by enough to count; one alone is undecided.
    A single late allocation is a jump, far larger than the slope times the number of steps."""
    column, _, least, exact = table.SERIES[series]
    drifts = table.memory(soak, series)
    if not drifts:
        if not soak.on_gpu and series == "reserved":
            raise NotHere("a CPU's allocator reserves nothing")
        raise Undecided("nothing was sampled")
    if (steps := min(drift.steps for drift in drifts)) < least:
        planned = soak.half - max(table.LEFT_OUT, soak.half // 10)
        few = f"{steps} settled steps of a process, and it takes {least}"
        raise (Undecided if planned >= least else NotHere)(few)
    said = [_grown(drift, exact) for drift in drifts]
    evidence = [
        {"process": part.name, "settled steps": drift.steps, "growth MiB": round(drift.growth, 4)}
        | {"MiB in 1000 steps": [round(1e3 * x, 4) for x in _interval(drift)], "it": words or "no"}
        | {"counts from": round(drift.bound, 3)}
        for part, drift, words in zip(soak.parts, drifts, said, strict=False)
    ]
    order = ("", SMALL, JUMPS, GROWS)
    worst = max(range(len(drifts)), key=lambda i: (order.index(said[i]), drifts[i].growth))
    value, low, high = (1e3 * x for x in _interval(drifts[worst]))
    found = f"{value:+.3g} MiB in 1000 steps [{low:+.3g}, {high:+.3g}]"
    found += f", {drifts[worst].growth:+.3g} MiB in {drifts[worst].steps}"
    if said[worst] in (SMALL, JUMPS):
        raise Undecided(said[worst], evidence, found)
    return found, not said[worst], evidence, _unsampled(soak, column)


def _unsampled(soak: Soak, column: str) -> list[str]:
    """Counts of the soak's steps without a sample, by process."""
    kept, found = (range(soak.half), range(soak.half, soak.steps)), [*soak.rows(), None, None]
    lost = []
    for name, steps, rows in zip(PROCESSES, kept, found, strict=False):
        there = set() if rows is None else {*rows.loc[rows[column].notna(), "step"]}
        if count := len({*steps} - there):
            lost.append(f"{count} of {len(steps)} steps {name}")
    return lost


def _grown(drift: table.Drift, exact: bool) -> str:
    """Describe a drift in words, "" for no growth."""
    rises = drift.slope.low > 0
    if drift.growth >= drift.bound:
        return GROWS if rises and drift.along >= drift.bound else JUMPS
    may = rises if exact else drift.slope.high * drift.steps >= drift.bound
    return SMALL if may else ""


def _interval(drift: table.Drift) -> tuple[float, float, float]:
    return drift.slope.value, drift.slope.low, drift.slope.high


@aim(f"tokens/s stay within {SPEED_SHARE:.0%} of the start")
def speed_does_not_drift(soak: Soak):
    """Claim that the run's drift interval is inside SPEED_SHARE; undecided if across."""
    if not soak.on_gpu:
        raise NotHere("a CPU's times say nothing about a GPU")
    drift = table.speed(soak)
    if drift is None:
        raise Undecided(f"fewer than three blocks of {table.BLOCK} steps")
    share, low, high = table.speed_share(drift)
    evidence = {"share": round(share, 5), "interval": [round(low, 5), round(high, 5)]}
    evidence |= {"tokens/s at the start": round(drift.level), "blocks": drift.slope.n}
    found = f"{share:+.2%} [{low:+.2%}, {high:+.2%}] in {drift.steps} steps"
    inside = low >= -SPEED_SHARE and high <= SPEED_SHARE
    if not inside and low <= SPEED_SHARE and high >= -SPEED_SHARE:
        raise Undecided("the interval is across the bound", evidence, found)
    return found, inside, evidence, _unsampled(soak, "step")


@claim("the losses after the restart are those without it, bit for bit")
def goes_on_after_the_restart(soak: Soak):
    """Claim that the restarted process repeats the losses of the first one's steps beyond the
    restart; both sum in a fixed order."""
    both = table.across(soak)
    if not len(both):
        raise Undecided("no step was taken by both processes")
    apart = float((both["without"] - both["after"]).abs().max())
    evidence = {"steps": len(both), "furthest": apart, "of": soak.overlap}
    found = f"{len(both)} steps" + f", {apart:.3g} apart at most" * (apart > 0)
    lost = min(soak.overlap, soak.steps - soak.half) - len(both)
    lost = [f"{lost} steps that both were to take"] * (lost > 0)
    return found, apart == 0.0, evidence, lost


@claim("a training that grows is warned at its first limit and stopped at its second")
def limits_stop_a_run(planted: Part):
    """Claim that the guard acts at its limits, by the process's own samples, unseen by it."""
    crossings = table.crossings(planted)
    if crossings is None:
        raise Undecided(planted.outcome)
    by_name = dict(zip(("warned", "stopped"), crossings, strict=True))
    steps = {name: [one.sampled, one.told] for name, one in by_name.items()}
    if planted.ended.status in LOST:
        raise Undecided(planted.outcome, steps)
    wrong = [
        f"crossed at step {sampled} and {name} at {told}"
        for name, (sampled, told) in steps.items()
        if told is None or sampled is None or abs(told - sampled) > WITHIN
    ]
    evidence = steps | {"limits MiB": [round(one.limit_mib, 1) for one in crossings]}
    if wrong:
        return f"; {', '.join(wrong)}", False, evidence
    return f", within {WITHIN} step of each crossing", True, evidence


@claim("a run that a limit stopped keeps its last checkpoint, its record and its samples")
def evidence_is_kept(planted: Part):
    """Claim that evidence is kept: the checkpoint is readable and of the step of the stop."""
    if planted.stop is None:
        raise Undecided(planted.outcome)
    step, missing = planted.stop["step"], []
    if planted.saved is None:
        missing.append(f"checkpoint {planted.result['saved']}")
    else:
        done = saving.read(planted.saved)["steps_done"]
        missing += [f"the checkpoint is of {done} steps"] * (done != step + 1)
    sampled = int(planted.rows["step"].max()) if len(planted.rows) else -1
    missing += [f"samples end at step {sampled}"] * (sampled != step)
    missing += [
        f"no {name}"
        for name in ("spec.json", "result.json")
        if not Path(planted.spec["folder"], name).is_file()
    ]
    evidence = {"stopped at": step, "checkpoint": planted.result["saved"], "samples": sampled + 1}
    return f"; not so: {', '.join(missing)}" * bool(missing), not missing, evidence


@claim("tensors ask for the same and losses are the same under every allocator setting")
def settings_ask_for_the_same(soak: Soak, trials: Sequence[Setting]):
    """Claim that settings change reserved memory, but neither requested memory nor losses."""
    _needs_trials(soak, trials)
    held = {name: table.middle(trials, name, "requested") for name in _names(trials)}
    losses = {t.name: t.losses for t in trials}
    apart = max(abs(a - b) for one in losses.values()
                for a, b in zip(one, losses[USUAL], strict=True))  # fmt: skip
    off = max(abs(value / held[USUAL] - 1) for value in held.values())
    evidence = {told(name): round(value, 2) for name, value in held.items()}
    found = f"at most {off:.2%} and {apart:.2g} nats apart"
    same = off <= SAME_SHARE and apart <= LOSS_APART
    return found, same, evidence | {"furthest loss": apart}


@aim("expandable segments leave no more unused than the usual setting")
def expandable_segments_waste_less(soak: Soak, trials: Sequence[Setting]):
    """Claim that expandable segments waste no more memory, as torch's own notes predict."""
    _needs_trials(soak, trials, EXPANDABLE)
    mib = {told(n): table.middle(trials, n, "fragmentation") for n in (USUAL, EXPANDABLE)}
    usual, other = mib.values()
    rounded = {name: round(value, 1) for name, value in mib.items()}
    return f"{other:,.0f} and {usual:,.0f} MiB", other <= usual, rounded


@aim(f"no allocator setting takes more than {SLOWER} times the usual setting's step")
def no_setting_is_slow(soak: Soak, trials: Sequence[Setting]):
    """Claim that no setting is slow, by trials of one turn, so that a slow machine affects both."""
    _needs_trials(soak, trials)
    found = {n: table.times_usual(trials, n) for n in _names(trials) if n != USUAL}
    evidence = {name: str(ratio) for name, ratio in found.items()}
    worst = max(found, key=lambda name: found[name].value)
    # the bounds of a single pair are NaN: its value counts
    slow = any(np.fmin(ratio.low, ratio.value) > SLOWER for ratio in found.values())
    text = f"{found[worst]} at most, {worst}"
    if not slow and any(np.fmax(ratio.high, ratio.value) > SLOWER for ratio in found.values()):
        raise Undecided("an interval is across the bound", evidence, text)
    return text, not slow, evidence


@aim(f"what every setting reserves is estimated to {RESERVED_SHARE:.0%}")
def reserved_is_estimated(soak: Soak, trials: Sequence[Setting], estimated: Sequence[Estimated]):
    """Claim that the allocator model, without a GPU, estimates every setting's reserved memory."""
    _needs_trials(soak, trials)
    said = {one.name: one for one in estimated}
    names = [name for name in _names(trials) if name in said]
    if unknown := [f"{told(n)}: {said[n].why or 'no number'}" for n in names
                   if math.isnan(said[n].reserved)]:  # fmt: skip
        raise Undecided("; ".join(unknown))
    if not names:
        raise NotHere("nothing was estimated")
    off = {n: said[n].reserved / table.middle(trials, n, "reserved") - 1 for n in names}
    worst = max(off, key=lambda name: abs(off[name]))
    evidence = {told(name): round(share, 4) for name, share in off.items()}
    found = f"{off[worst]:+.1%} at most, {told(worst)}"
    return found, abs(off[worst]) <= RESERVED_SHARE, evidence


def _names(trials: Sequence[Setting]) -> list[str]:
    return list(dict.fromkeys(trial.name for trial in trials))


def _needs_trials(soak: Soak, trials: Sequence[Setting], *needed: str) -> None:
    """Raise Undecided or NotHere unless these trials can decide a claim."""
    if not soak.on_gpu:
        raise NotHere("an allocator's settings act on a GPU alone")
    if not trials or any(name not in _names(trials) for name in needed):
        raise NotHere(NOT_OF_THIS_RUN)
    if bad := [f"{told(t.name)}: {t.ended.status}" for t in trials if t.ended.status != "ok"]:
        raise Undecided(", ".join(bad))
