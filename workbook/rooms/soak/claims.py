"""Claims of the soak notebook, each decided by rows and never by hand."""

import math
from collections.abc import Sequence
from pathlib import Path

from nsa.model import saving
from workbook.rooms.soak import table
from workbook.rooms.soak.trials import PROCESSES, USUAL, Estimated, Part, Setting, Soak, told
from workbook.runs.claim import Claim, aim_of, verdict_of

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


def comes_to_its_end(soak: Soak) -> Claim:
    """Claim that the soak completes; a process that was killed or had no time decides nothing."""
    sentence = f"{soak.steps} steps come to their end, with a restart before step {soak.half}"
    evidence = {"processes": [part.outcome for part in soak.parts]}
    if soak.whole:
        return Claim(sentence, "PASS", evidence)
    last = soak.parts[-1]
    if last.ended.status in LOST:
        return Claim.undecided(sentence, last.outcome, evidence)
    if last.outcome == "ok":  # there is no second
        return Claim.undecided(sentence, f"no checkpoint: {last.result['saved']}", evidence)
    return Claim(f"{sentence}; {last.outcome}", "FAIL", evidence)


def memory_does_not_grow(soak: Soak, series: str) -> Claim:
    """Claim that memory does not rise steadily and by enough to count; one alone is undecided.
    A single late allocation is a jump, far larger than the slope times the number of steps."""
    _, words, least, exact = table.SERIES[series]
    sentence = f"{words} does not grow from step to step"
    drifts = table.memory(soak, series)
    if not drifts:
        if not soak.on_gpu and series == "reserved":
            return Claim.not_here(sentence, "a CPU's allocator reserves nothing")
        return Claim.undecided(sentence, "nothing was sampled")
    if (steps := min(drift.steps for drift in drifts)) < least:
        planned = soak.half - max(table.LEFT_OUT, soak.half // 10)
        few = Claim.undecided if planned >= least else Claim.not_here
        return few(sentence, f"{steps} settled steps of a process, and it takes {least}")
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
    sentence += f": {value:+.3g} MiB in 1000 steps [{low:+.3g}, {high:+.3g}]"
    sentence += f", {drifts[worst].growth:+.3g} MiB in {drifts[worst].steps}"
    if said[worst] in (SMALL, JUMPS):
        return Claim.undecided(sentence, said[worst], evidence)
    column = table.SERIES[series][0]
    return Claim(sentence, verdict_of(not said[worst]), evidence).over(_unsampled(soak, column))


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


def speed_does_not_drift(soak: Soak) -> Claim:
    """Claim that the run's drift interval is inside SPEED_SHARE; undecided if across."""
    sentence = f"tokens/s stay within {SPEED_SHARE:.0%} of the start"
    if not soak.on_gpu:
        return Claim.not_here(sentence, "a CPU's times say nothing about a GPU")
    drift = table.speed(soak)
    if drift is None:
        return Claim.undecided(sentence, f"fewer than three blocks of {table.BLOCK} steps")
    share, low, high = table.speed_share(drift)
    evidence = {"share": round(share, 5), "interval": [round(low, 5), round(high, 5)]}
    evidence |= {"tokens/s at the start": round(drift.level), "blocks": drift.slope.n}
    sentence = f"{sentence}: {share:+.2%} [{low:+.2%}, {high:+.2%}] in {drift.steps} steps"
    if low >= -SPEED_SHARE and high <= SPEED_SHARE:
        return Claim(sentence, "PASS", evidence).over(_unsampled(soak, "step"))
    if low > SPEED_SHARE or high < -SPEED_SHARE:
        return Claim(sentence, aim_of(False), evidence)
    return Claim.undecided(sentence, "the interval is across the bound", evidence)


def goes_on_after_the_restart(soak: Soak) -> Claim:
    """Claim that the restarted process repeats the losses of the first one's steps beyond the
    restart; both sum in a fixed order."""
    sentence = "the losses after the restart are those without it, bit for bit"
    both = table.across(soak)
    if not len(both):
        return Claim.undecided(sentence, "no step was taken by both processes")
    apart = float((both["without"] - both["after"]).abs().max())
    evidence = {"steps": len(both), "furthest": apart, "of": soak.overlap}
    found = f"{len(both)} steps" + f", {apart:.3g} apart at most" * (apart > 0)
    lost = min(soak.overlap, soak.steps - soak.half) - len(both)
    claim = Claim(f"{sentence}: {found}", verdict_of(apart == 0.0), evidence)
    return claim.over([f"{lost} steps that both were to take"] * (lost > 0))


def limits_stop_a_run(planted: Part) -> Claim:
    """Claim that the guard acts at its limits, by the process's own samples, unseen by it."""
    sentence = "a training that grows is warned at its first limit and stopped at its second"
    found = table.crossings(planted)
    if found is None:
        return Claim.undecided(sentence, planted.outcome)
    names = ("warned", "stopped")
    steps = {name: [one.sampled, one.told] for name, one in zip(names, found, strict=True)}
    if planted.ended.status in LOST:
        return Claim.undecided(sentence, planted.outcome, steps)
    wrong = [
        f"crossed at step {one.sampled} and {name} at {one.told}"
        for name, one in zip(names, found, strict=True)
        if one.told is None or one.sampled is None or abs(one.told - one.sampled) > WITHIN
    ]
    evidence = steps | {"limits MiB": [round(one.limit_mib, 1) for one in found]}
    if wrong:
        return Claim(f"{sentence}; {', '.join(wrong)}", "FAIL", evidence)
    late = f"within {WITHIN} step of each crossing"
    return Claim(f"{sentence}, {late}", "PASS", evidence)


def evidence_is_kept(planted: Part) -> Claim:
    """Claim that evidence is kept: the checkpoint is readable and of the step of the stop."""
    sentence = "a run that a limit stopped keeps its last checkpoint, its record and its samples"
    if planted.stop is None:
        return Claim.undecided(sentence, planted.outcome)
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
    if missing:
        return Claim(f"{sentence}; not so: {', '.join(missing)}", "FAIL", evidence)
    return Claim(sentence, "PASS", evidence)


def settings_ask_for_the_same(soak: Soak, trials: Sequence[Setting]) -> Claim:
    """Claim that settings change reserved memory, but neither requested memory nor losses."""
    sentence = "tensors ask for the same and losses are the same under every allocator setting"
    if (why := _why_not(soak, trials)) is not None:
        return why(sentence)
    held = {name: table.middle(trials, name, "requested") for name in _names(trials)}
    losses = {t.name: t.losses for t in trials}
    apart = max(abs(a - b) for one in losses.values()
                for a, b in zip(one, losses[USUAL], strict=True))  # fmt: skip
    off = max(abs(value / held[USUAL] - 1) for value in held.values())
    evidence = {told(name): round(value, 2) for name, value in held.items()}
    evidence |= {"furthest loss": apart}
    sentence = f"{sentence}: at most {off:.2%} and {apart:.2g} nats apart"
    return Claim(sentence, verdict_of(off <= SAME_SHARE and apart <= LOSS_APART), evidence)


def expandable_segments_waste_less(soak: Soak, trials: Sequence[Setting]) -> Claim:
    """Claim that expandable segments waste no more memory, as torch's own notes predict."""
    sentence = "expandable segments leave no more unused than the usual setting"
    if (why := _why_not(soak, trials, EXPANDABLE)) is not None:
        return why(sentence)
    mib = {told(n): table.middle(trials, n, "fragmentation") for n in (USUAL, EXPANDABLE)}
    usual, other = mib.values()
    rounded = {name: round(value, 1) for name, value in mib.items()}
    return Claim(f"{sentence}: {other:,.0f} and {usual:,.0f} MiB", aim_of(other <= usual), rounded)


def no_setting_is_slow(soak: Soak, trials: Sequence[Setting]) -> Claim:
    """Claim that no setting is slow, by trials of one turn, so that a slow machine affects both."""
    sentence = f"no allocator setting takes more than {SLOWER} times the usual setting's step"
    if (why := _why_not(soak, trials)) is not None:
        return why(sentence)
    found = {n: table.times_usual(trials, n) for n in _names(trials) if n != USUAL}
    evidence = {name: str(ratio) for name, ratio in found.items()}
    worst = max(found, key=lambda name: found[name].value)
    sentence = f"{sentence}: {found[worst]} at most, {worst}"
    slow = [n for n, ratio in found.items() if _low(ratio) > SLOWER]
    if slow:
        return Claim(sentence, aim_of(False), evidence)
    if any(_high(ratio) > SLOWER for ratio in found.values()):
        return Claim.undecided(sentence, "an interval is across the bound", evidence)
    return Claim(sentence, "PASS", evidence)


def reserved_is_estimated(
    soak: Soak, trials: Sequence[Setting], estimated: Sequence[Estimated]
) -> Claim:
    """Claim that the allocator model, without a GPU, estimates every setting's reserved memory."""
    sentence = f"what every setting reserves is estimated to {RESERVED_SHARE:.0%}"
    if (why := _why_not(soak, trials)) is not None:
        return why(sentence)
    said = {one.name: one for one in estimated}
    if unknown := [f"{told(n)}: {said[n].why or 'no number'}" for n in _names(trials)
                   if n in said and math.isnan(said[n].reserved)]:  # fmt: skip
        return Claim.undecided(sentence, "; ".join(unknown))
    off = {n: said[n].reserved / table.middle(trials, n, "reserved") - 1
           for n in _names(trials) if n in said}  # fmt: skip
    if not off:
        return Claim.not_here(sentence, "nothing was estimated")
    worst = max(off, key=lambda name: abs(off[name]))
    evidence = {told(name): round(share, 4) for name, share in off.items()}
    sentence = f"{sentence}: {off[worst]:+.1%} at most, {told(worst)}"
    return Claim(sentence, aim_of(abs(off[worst]) <= RESERVED_SHARE), evidence)


def _low(ratio) -> float:
    return ratio.value if math.isnan(ratio.low) else ratio.low


def _high(ratio) -> float:
    return ratio.value if math.isnan(ratio.high) else ratio.high


def _names(trials: Sequence[Setting]) -> list[str]:
    return list(dict.fromkeys(trial.name for trial in trials))


def _why_not(soak: Soak, trials: Sequence[Setting], *needed: str):
    """Return a maker of claims for sentences that these trials cannot decide; None if they can."""
    if not soak.on_gpu:
        return lambda text: Claim.not_here(text, "an allocator's settings act on a GPU alone")
    if not trials or any(name not in _names(trials) for name in needed):
        return lambda text: Claim.not_here(text, "this run was not to measure it")
    bad = [f"{told(t.name)}: {t.ended.status}" for t in trials if t.ended.status != "ok"]
    if bad:
        return lambda text: Claim.undecided(text, ", ".join(bad))
    return None
