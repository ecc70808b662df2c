"""Claims of the throughput notebook, each decided by rows and never by hand.

Aims are targets of the 12-layer production model in bf16 on an H200.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps

import numpy as np
import pandas

from workbook.rooms.throughput import table
from workbook.runs import metrics
from workbook.runs.claim import Claim, aim_of, different_programs, verdict_of

METER = 0.01
FLAT_STEPS = 100  # fewer steps confuse growth with the settling of the first steps
FLAT_SHARE = 0.01
POOLED = 0.1  # of a curve's steps, around the one whose seeds' spread is computed

AIMED, OURS = "production, 12 layers, bf16", "triton"
TOKENS_S = 250_000
TOKENS = 2048
TWIN_STEP = 1.25
LONG = 16384
TWO_RANKS = 1.9
WATCHED = 1.15
LOSS_STEPS = 500
LOSS_SHARE = 0.02


def all_claims(
    df: pandas.DataFrame, rows: Sequence[dict], lessons: Sequence[dict] = ()
) -> list[Claim]:
    """Claims that must hold in any run, from rows of its trials and of correctness.lessons."""
    return [
        nothing_broke(df),
        the_meter_is_right(df),
        programs_are_different(rows),
        nothing_is_compiled_late(df),
        no_step_waits_for_the_device(df),
        memory_is_flat(df),
        backends_learn_alike(df),
        *([lessons_are_learnt(lessons)] if lessons else []),
    ]


def aims(df: pandas.DataFrame) -> list[Claim]:
    """Aims with their measurements; NOT APPLICABLE if this run or machine cannot decide."""
    of_speed = (is_fast, is_near_the_twin, beats_the_twin_when_long, two_ranks_pay)
    return [aim(df) for aim in (*of_speed, watching_costs_little, learns_as_the_twin)]


def nothing_broke(df: pandas.DataFrame) -> Claim:
    """Claim that no cell broke: OOM, declined and not run are valid, error, crash and hang not."""
    rows = table.cells(df)
    bad = rows[rows["outcome"].isin(["error", "crash", "timeout"])]
    sentence = f"each of {len(rows)} training cells ran or said why it does not"
    if not (rows["outcome"] == "ok").any():
        return Claim(f"{sentence}: none ran", "FAIL" if len(bad) else "INCONCLUSIVE", {})
    found = {_cell(row): f"{row.outcome}: {row.message}" for row in bad.itertuples()}
    if found:
        return Claim(f"{sentence}; broke off: {', '.join(found)}", "FAIL", found)
    lost = [_cell(row) for row in rows[rows["outcome"] == "not run"].itertuples()]
    claim = Claim(sentence, "PASS", rows["outcome"].value_counts().to_dict())
    return claim.over(lost + _lost(df, "step_time", "step"))


def the_meter_is_right(df: pandas.DataFrame) -> Claim:
    """Claim that two clocks agree; the case study's meter read 66 where its seconds gave 13.2."""
    step, recount = (table.at_points(df, "tokens_per_second", m) for m in ("step", "recount"))
    off = (step / recount - 1).abs().dropna()
    sentence = f"tokens/s by the steps' clock and by the wall's agree to {METER:.0%}"
    if not len(off):
        return Claim(f"{sentence}: nothing was measured", "INCONCLUSIVE", {})
    claim = Claim(
        f"{sentence}: at most {off.max():.2%} apart in {len(off)} cells",
        verdict_of(off.max() <= METER),
        {"furthest": ", ".join(map(str, off.idxmax())), "share": round(float(off.max()), 5)},
    )
    return claim.over(_lost(df, "tokens_per_second", "step", "recount"))


def programs_are_different(rows: Sequence[dict]) -> Claim:
    """Claim that path witnesses of NSA's backends and the dense baseline differ."""
    served = {row["name"]: tuple(sorted((b, *p) for b, p in row["paths"].items()))
              for row in rows if row["outcome"] == "ok" and row["paths"]}  # fmt: skip
    planned = {row["name"]: row["outcome"] for row in rows}
    return different_programs(served, served, "attentions", planned)


def nothing_is_compiled_late(df: pandas.DataFrame) -> Claim:
    """Claim that no torch.compile graph or Triton kernel is compiled in the timed steps."""
    return _none_of(df, "recompilations", "nothing is compiled after step 2", "it was in",
                    ": nothing was measured")  # fmt: skip


def no_step_waits_for_the_device(df: pandas.DataFrame) -> Claim:
    """Claim that no step waits for the device: a host that waits cannot launch ahead."""
    sentence = "the host waits for the device in no step"
    if table.on_cpu(df):
        return Claim.not_here(sentence, "no step was to run on a GPU")
    return _none_of(df, "syncs", sentence, "it does in", ": not decided, no step ran on a GPU")


def memory_is_flat(df: pandas.DataFrame) -> Claim:
    """Claim that memory is flat: not both a slope's 95 % interval above 0 and growth over 1 %."""
    sentence = f"memory, the device's and the host's, grows by at most {FLAT_SHARE:.0%} in a run"
    found, grown, lost = {}, [], []
    keys = ["mode", "model", "backend", "variant"]
    highest = table.memory_over_steps(df).groupby(keys)["median"].max()
    for mode in ("device", "host"):
        for row in table.over_tokens(df, "memory_growth", mode, None).itertuples():
            if row.steps < FLAT_STEPS:
                continue
            level = highest.get((mode, row.model, row.backend, row.variant), np.nan)
            share, name = float(row.median * row.steps / level), f"{_cell(row)}, {mode}"
            if not np.isfinite(share):
                lost.append(name)
                continue
            found[name] = round(share, 5)
            grown += [name] * (row.q20 > 0 and share > FLAT_SHARE)
    if not found:
        few = f"no cell of at least {FLAT_STEPS} steps"
        short = table.cells(df)["steps"].max() < FLAT_STEPS
        return Claim.not_here(sentence, few) if short else Claim.undecided(sentence, few)
    if grown:
        told = {name: found[name] for name in grown}
        return Claim(f"{sentence}; it grew in {', '.join(grown)}", "FAIL", told)
    worst = max(found.values())
    claim = Claim(f"{sentence}: {worst:.2%} at most, {len(found)} series", "PASS", found)
    rows = table.labelled(df)
    rows = rows[(rows["x_name"] == "tokens") & (rows["steps"] >= FLAT_STEPS)]
    series = {"metric": ["memory_growth"], "mode": ["device", "host"]}
    return claim.over(lost + metrics.unmeasured(rows, table.POINT, of=series))


def backends_learn_alike(df: pandas.DataFrame) -> Claim:
    """Claim that backends with equal batches and weights differ less than seeds. Two seeds' curves
    cross, and would have no spread there. So a step's spread is the root mean square over the
    tenth of the run around it."""
    losses = table.losses(df)
    curves = {n: losses.loc[n] for n in losses.index.unique("backend") if not n.startswith("dense")}
    sentence = (
        f"the loss curves of {', '.join(curves) or 'NSA backends'} lie within their seeds' spread"
    )
    seeds = {name: len(mine) for name, mine in curves.items()}
    if len(curves) < 2 or min(seeds.values()) < 2:
        why = "two backends with two seeds each are needed"
        cells = table.cells(df)
        planned = cells[(cells["variant"] == "curve") & ~cells["backend"].str.startswith("dense")]
        if len(df) and (planned["outcome"] == "ok").all():
            return Claim.not_here(sentence, why)
        return Claim.undecided(sentence, why, seeds)
    broken = [name for name, mine in curves.items() if not np.isfinite(mine.to_numpy()).all()]
    if broken:
        return Claim(f"{sentence}; not finite: {', '.join(broken)}", "FAIL", broken)
    shared = sorted(set.intersection(*(set(mine.index) for mine in curves.values())))  # seeds
    means = pandas.DataFrame({name: mine.loc[shared].mean() for name, mine in curves.items()})
    apart = means.max(axis=1) - means.min(axis=1)
    spread = pandas.DataFrame({n: _seeds_apart(mine) for n, mine in curves.items()}).max(axis=1)
    # fp32 rounding, if equal seeds and data leave no spread at all.
    ratio = apart / spread.clip(lower=1e-6)
    worst = ratio.idxmax()
    claim = Claim(
        f"{sentence}: at most {ratio[worst]:.2f} of it, at step {worst:.0f}",
        verdict_of(ratio[worst] <= 1),
        {"nats apart": round(float(apart[worst]), 6), "spread": round(float(spread[worst]), 6)},
    )
    return claim.over(_lost_losses(df, curves))


def lessons_are_learnt(lessons: Sequence[dict]) -> Claim:
    """Claim that tasks in reach are solved, others stay at chance, and no token sees the future."""
    found = {row["lesson"]: row.get("accuracy") or row["outcome"] for row in lessons}
    sentence = f"NSA learns {', '.join(found)} and nothing out of its reach"
    wrong = [row["lesson"] for row in lessons if not row.get("as_expected", True)]
    lost = [row["lesson"] for row in lessons if row["outcome"] != "ok"]
    if wrong:
        return Claim(f"{sentence}; not so: {', '.join(wrong)}", "FAIL", found)
    if lost:
        return Claim(f"{sentence}; not finished: {', '.join(lost)}", "INCONCLUSIVE", found)
    return Claim(sentence, "PASS", found)


class NotMeasured(LookupError):
    """Raised if a run that was to measure an aim could not: INCONCLUSIVE."""


class NotHere(LookupError):
    """Raised if this machine, or a run with these parameters, cannot decide: NOT APPLICABLE."""


def _aim(sentence: str):
    """Decorate a function to return a claim. It returns (finding, True if it suffices, evidence,
    unmeasured points), or raises NotMeasured or NotHere."""

    def wrap(measured: Callable[[pandas.DataFrame], tuple[str, bool, dict, list[str]]]):
        @wraps(measured)
        def claim(df: pandas.DataFrame) -> Claim:
            try:
                found, enough, evidence, lost = measured(df)
            except NotMeasured as why:
                return Claim.undecided(sentence, str(why))
            except NotHere as why:
                return Claim.not_here(sentence, str(why))
            return Claim(f"{sentence}: {found}", aim_of(enough), evidence).over(lost)

        return claim

    return wrap


@_aim(f"{OURS} trains at least {TOKENS_S:,} tokens/s at T {TOKENS}")
def is_fast(df: pandas.DataFrame):
    speed = _at(_aimed(df, "tokens_per_second", OURS))
    return f"{speed:,.0f}", speed >= TOKENS_S, {"tokens/s": speed}, []


@_aim(f"{OURS}'s step at T {TOKENS} takes at most {TWIN_STEP} of the dense twin's")
def is_near_the_twin(df: pandas.DataFrame):
    ms = {name: _at(_aimed(df, "step_time", name)) for name in (OURS, "dense")}
    ratio = ms[OURS] / ms["dense"]
    return f"{ratio:.3f}", ratio <= TWIN_STEP, ms, []


@_aim(f"{OURS} trains faster than the dense twin from T {LONG} on")
def beats_the_twin_when_long(df: pandas.DataFrame):
    """Claim that NSA beats dense at every T >= 16k at which one of them was to be measured."""
    ours, dense = (_aimed(df, "tokens_per_second", name) for name in (OURS, "dense"))
    ratio = (ours / dense).dropna().loc[lambda line: line.index >= LONG]
    if not len(ratio):
        raise NotHere("no such T was measured with both")
    found = {f"T {t}": round(float(r), 3) for t, r in ratio.items()}
    rows = table.over_tokens(df, "tokens_per_second")
    rows = rows[(rows["model"] == AIMED) & (rows["x_value"] >= LONG)]
    lost = metrics.unmeasured(rows, ["x_value"], of={"backend": [OURS, "dense"]})
    return f"{ratio.min():.2f} times at least, at T {ratio.idxmin()}", ratio.min() > 1, found, lost


@_aim(f"two GPUs train at least {TWO_RANKS} times the tokens/s of one, with DDP")
def two_ranks_pay(df: pandas.DataFrame):
    """Speedup of DDP on two ranks with twice the batch, for every other option."""
    _needs_an_h200(df)
    rows = table.scaling(df).reset_index()
    wanted = {"model": AIMED, "backend": OURS, "parallel": "ddp", "ranks": 2}
    rows = rows[(rows[list(wanted)] == list(wanted.values())).all(axis=1)]
    rows = rows.assign(median=rows["times one rank"])
    lost = metrics.unmeasured(rows, ["T", "how"])
    rows = _with(rows, "median", "two ranks beside one")
    columns = rows["T"], rows["how"], rows["times one rank"]
    times = {f"T {t} {how}".strip(): float(x) for t, how, x in zip(*columns, strict=True)}
    least = min(times.values())
    found = {name: round(x, 3) for name, x in times.items()}
    return f"{least:.3f}", least >= TWO_RANKS, found, lost


@_aim(f"with all observers on a step takes at most {WATCHED} of one with none")
def watching_costs_little(df: pandas.DataFrame):
    """Cost of all observers relative to the same steps with none, for any backend."""
    _needs_an_h200(df)
    planned = table.over_tokens(df, "observing", variant=None)
    planned = planned[planned["model"] == AIMED]
    rows = _with(planned, "median", "a step with them")
    found = {f"{row.backend} T {row.x_value}": round(row.median, 3) for row in rows.itertuples()}
    worst = max(found.values())
    return f"{worst:.3f}", worst <= WATCHED, found, metrics.unmeasured(planned, table.POINT)


@_aim(f"after {LOSS_STEPS} steps NSA's loss is within {LOSS_SHARE:.0%} of the twin's")
def learns_as_the_twin(df: pandas.DataFrame):
    """Claim that losses agree over the curves' last tenth; fewer than 500 steps are not enough. NSA
    backends are averaged: they compute the same function, so each is another sample."""
    rows = table.labelled(df)
    rows = rows[(rows["metric"] == "loss") & rows["median"].notna()]
    if not len(rows) or rows["steps"].min() < LOSS_STEPS:
        raise NotHere(f"no curves of {LOSS_STEPS} steps in this run")
    final = table.final_losses(df).mean(axis=1)
    if "dense" not in final.index or len(final) < 2:
        raise NotHere("not both were trained")
    off = final.drop("dense").mean() / final["dense"] - 1
    found = {name: round(float(nats), 4) for name, nats in final.items()}
    return f"{off:+.2%}", abs(off) <= LOSS_SHARE, found, _lost_losses(df, final.index)


def _aimed(df: pandas.DataFrame, metric: str, backend: str) -> pandas.Series:
    """Values by T of the production model's plain cells."""
    _needs_an_h200(df)
    rows = table.over_tokens(df, metric)
    rows = rows[(rows["model"] == AIMED) & (rows["backend"] == backend)]
    _with(rows, "median", backend)
    return rows.set_index("x_value")["median"]


def _at(line: pandas.Series) -> float:
    if TOKENS not in line:
        raise NotHere(f"T {TOKENS} was not to be measured")
    if not np.isfinite(line[TOKENS]):
        raise NotMeasured(f"T {TOKENS} has no value")
    return float(line[TOKENS])


def _with(rows: pandas.DataFrame, column: str, what: str) -> pandas.DataFrame:
    """Rows that have a value; NotHere if there are no rows, NotMeasured if none has a value."""
    if not len(rows):
        raise NotHere(f"{what} was not to be measured in this run")
    if rows[column].isna().all():
        raise NotMeasured(f"{what} was to be measured and has no value")
    return rows.dropna(subset=column)


def _needs_an_h200(df: pandas.DataFrame) -> None:
    if not len(df) or table.on_cpu(df):
        raise NotHere("a CPU's times say nothing about a GPU")
    gpu = df["device"].iloc[0]
    if "H200" not in gpu:
        raise NotHere(f"the aims are for an H200, this is {gpu}")


def _seeds_apart(curves: pandas.DataFrame) -> pandas.Series:
    """Spread of one backend's seeds, a row each, by step: see `backends_learn_alike`."""
    apart = curves.max() - curves.min()
    width = max(1, round(POOLED * len(apart)))
    return (apart**2).rolling(width, min_periods=1, center=True).mean().clip(lower=0) ** 0.5


def _none_of(df: pandas.DataFrame, metric: str, sentence: str, it: str, unmeasured: str) -> Claim:
    """Make the claim that this count is 0 in every cell."""
    rows = table.over_tokens(df, metric, variant=None).dropna(subset="median")
    if not len(rows):
        return Claim(sentence + unmeasured, "INCONCLUSIVE", {})
    found = {_cell(row): int(row.median) for row in rows.itertuples()}
    counted = {cell: count for cell, count in found.items() if count}
    if counted:
        return Claim(f"{sentence}; {it} {', '.join(counted)}", "FAIL", counted)
    claim = Claim(f"{sentence}, in {len(found)} cells", "PASS", {"cells": len(found)})
    return claim.over(_lost(df, metric, "step"))


def _lost(df: pandas.DataFrame, metric: str, *modes: str) -> list[str]:
    """Cells that lack this metric, curves aside."""
    rows = table.labelled(df)
    rows = rows[(rows["x_name"] == "tokens") & (rows["variant"] != "curve")]
    return metrics.unmeasured(rows, table.POINT, of={"metric": [metric], "mode": modes})


def _lost_losses(df: pandas.DataFrame, backends: Iterable[str]) -> list[str]:
    """Windows of these backends' curves without a loss, for every seed that one of them has."""
    rows = table.labelled(df)
    rows = rows[rows["metric"] == "loss"]
    return metrics.unmeasured(rows, ["x_value"], ["seed"], of={"backend": list(backends)})


def _cell(row) -> str:
    variant = f" {row.variant}" if row.variant else ""
    return f"{row.backend}{variant} T {row.x_value}"
