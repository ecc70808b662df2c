"""Claims of the throughput notebook, each decided by rows and never by hand.

Aims are targets of the 12-layer production model in bf16 on an H200.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas
from scipy.stats import studentized_range

from workbook.rooms.throughput import table
from workbook.runs import metrics
from workbook.runs.claim import Claim, NotHere, Undecided, aim, claim
from workbook.runs.rules import different_programs, needs_h200, no_cell_broke

METER = 0.01
FLAT_STEPS = 100  # fewer steps confuse growth with the settling of the first steps
FLAT_SHARE = 0.01
ALPHA = 0.01  # chance that backends which learn alike are said not to
PARTS = 10  # of a curve, each tested

AIMED, OURS = "production, 12 layers, bf16", "triton"
TOKENS_S = 250_000
TOKENS = 2048
TWIN_STEP = 1.25
LONG = 16384
TWO_RANKS = 1.9
WATCHED = 1.15
LOSS_STEPS = 500
LOSS_SHARE = 0.02
CPU = "a CPU's times say nothing about a GPU"


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
    return [one(df) for one in (*of_speed, watching_costs_little, learns_as_the_twin)]


def nothing_broke(df: pandas.DataFrame) -> Claim:
    """Claim that no cell broke: OOM, declined and not run are valid, error, crash and hang not."""
    rows = table.cells(df)
    bad = rows[rows["outcome"].isin(["error", "crash", "timeout"])]
    broken = {_cell(row): f"{row.outcome}: {row.message}" for row in bad.itertuples()}
    ran = (rows["outcome"] == "ok").any()
    lost = [_cell(row) for row in rows[rows["outcome"] == "not run"].itertuples()]
    return no_cell_broke(
        f"each of {len(rows)} training cells ran or said why it does not",
        broken,
        rows["outcome"].value_counts().to_dict() if ran else {},
        lost + _lost(df, "step_time", "step"),
    )


@claim(f"tokens/s by the steps' clock and by the wall's agree to {METER:.0%}")
def the_meter_is_right(df: pandas.DataFrame):
    """Claim that two clocks agree; the case study's meter read 66 where its seconds gave 13.2."""
    step, recount = (table.at_points(df, "tokens_per_second", m) for m in ("step", "recount"))
    off = (step / recount - 1).abs().dropna()
    if not len(off):
        raise Undecided("nothing was measured")
    found = f"at most {off.max():.2%} apart in {len(off)} cells"
    evidence = {"furthest": ", ".join(map(str, off.idxmax())), "share": round(float(off.max()), 5)}
    return found, off.max() <= METER, evidence, _lost(df, "tokens_per_second", "step", "recount")


def programs_are_different(rows: Sequence[dict]) -> Claim:
    """Claim that path witnesses of NSA's backends and the dense baseline differ."""
    served = {row["name"]: tuple(sorted((b, *p) for b, p in row["paths"].items()))
              for row in rows if row["outcome"] == "ok" and row["paths"]}  # fmt: skip
    planned = {row["name"]: row["outcome"] for row in rows}
    return different_programs(served, served, "attentions", planned)


@claim("nothing is compiled after step 2")
def nothing_is_compiled_late(df: pandas.DataFrame):
    """Claim that no torch.compile graph or Triton kernel is compiled in the timed steps."""
    return _none_of(df, "recompilations", "it was in", "nothing was measured")


@claim("the host waits for the device in no step")
def no_step_waits_for_the_device(df: pandas.DataFrame):
    """Claim that no step waits for the device: a host that waits cannot launch ahead."""
    if table.on_cpu(df):
        raise NotHere("no step was to run on a GPU")
    return _none_of(df, "syncs", "it does in", "no step ran on a GPU")


@claim(f"memory, the device's and the host's, grows by at most {FLAT_SHARE:.0%} in a run")
def memory_is_flat(df: pandas.DataFrame):
    """Claim that memory is flat: not both a slope's 95 % interval above 0 and growth over 1 %."""
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
        short = table.cells(df)["steps"].max() < FLAT_STEPS
        raise (NotHere if short else Undecided)(f"no cell of at least {FLAT_STEPS} steps")
    if grown:
        return f"; it grew in {', '.join(grown)}", False, {name: found[name] for name in grown}
    rows = table.labelled(df)
    rows = rows[(rows["x_name"] == "tokens") & (rows["steps"] >= FLAT_STEPS)]
    series = {"metric": ["memory_growth"], "mode": ["device", "host"]}
    lost += metrics.unmeasured(rows, table.POINT, of=series)
    return f"{max(found.values()):.2%} at most, {len(found)} series", True, found, lost


def _curves(df: pandas.DataFrame) -> dict[str, pandas.DataFrame]:
    """Loss curves of NSA's backends."""
    losses = table.losses(df)
    return {n: losses.loc[n] for n in losses.index.unique("backend") if not n.startswith("dense")}


@claim(
    lambda df: (
        f"the loss curves of {', '.join(_curves(df)) or 'NSA backends'} lie within their "
        "seeds' spread"
    )
)
def backends_learn_alike(df: pandas.DataFrame):
    """Claim that backends with equal batches and weights differ no more than seeds make them.

    Rounding alone parts curves as another seed does. So the mean losses of each tenth of the run
    are compared by Tukey's range test, with Bonferroni's correction for the tenths: backends that
    learn alike fail in one run of a hundred. The first tenths, where seeds are near, decide most.
    """
    curves = _curves(df)
    seeds = {name: len(mine) for name, mine in curves.items()}
    shared = (
        sorted(set.intersection(*(set(mine.index) for mine in curves.values()))) if curves else []
    )
    if len(curves) < 2 or len(shared) < 2:
        why = "two backends with two seeds each are needed"
        cells = table.cells(df)
        planned = cells[(cells["variant"] == "curve") & ~cells["backend"].str.startswith("dense")]
        if len(df) and (planned["outcome"] == "ok").all():
            raise NotHere(why)
        raise Undecided(why, seeds)
    broken = [name for name, mine in curves.items() if not np.isfinite(mine.to_numpy()).all()]
    if broken:
        return f"; not finite: {', '.join(broken)}", False, broken
    losses = np.stack([mine.loc[shared] for mine in curves.values()])  # backend, seed, step
    parts = np.array_split(losses, min(PARTS, losses.shape[2]), axis=2)
    means = np.stack([part.mean(axis=2) for part in parts])  # part, backend, seed
    apart = np.ptp(means.mean(axis=2), axis=1)
    error = (means.var(axis=2, ddof=1).mean(axis=1) / len(shared)) ** 0.5
    error = error.clip(min=1e-6)  # fp32 rounding, if seeds leave no spread at all
    freedom = len(curves), len(curves) * (len(shared) - 1)
    p = np.minimum(studentized_range.sf(apart / error, *freedom) * len(parts), 1.0)
    worst = int(p.argmin())
    least = (error * studentized_range.isf(ALPHA / len(parts), *freedom)).min()
    evidence = {"p": p[worst], "nats apart": apart[worst], "nats that would show": least}
    evidence = {name: round(float(value), 6) for name, value in evidence.items()}
    found = f"Tukey's p is {p[worst]:.2g} at least, where {least:.3f} nats would show"
    return found, p[worst] >= ALPHA, evidence, _lost_losses(df, curves)


@claim(lambda lessons: f"NSA learns {', '.join(r['lesson'] for r in lessons)} and nothing out of "
                       "its reach")  # fmt: skip
def lessons_are_learnt(lessons: Sequence[dict]):
    """Claim that tasks in reach are solved, others stay at chance, and no token sees the future."""
    found = {row["lesson"]: row.get("accuracy") or row["outcome"] for row in lessons}
    wrong = [row["lesson"] for row in lessons if not row.get("as_expected", True)]
    lost = [row["lesson"] for row in lessons if row["outcome"] != "ok"]
    return f"; not so: {', '.join(wrong)}" * bool(wrong), not wrong, found, lost


@aim(f"{OURS} trains at least {TOKENS_S:,} tokens/s at T {TOKENS}")
def is_fast(df: pandas.DataFrame):
    speed = _at(_aimed(df, "tokens_per_second", OURS))
    return f"{speed:,.0f}", speed >= TOKENS_S, {"tokens/s": speed}, []


@aim(f"{OURS}'s step at T {TOKENS} takes at most {TWIN_STEP} of the dense twin's")
def is_near_the_twin(df: pandas.DataFrame):
    ms = {name: _at(_aimed(df, "step_time", name)) for name in (OURS, "dense")}
    ratio = ms[OURS] / ms["dense"]
    return f"{ratio:.3f}", ratio <= TWIN_STEP, ms, []


@aim(f"{OURS} trains faster than the dense twin from T {LONG} on")
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


@aim(f"two GPUs train at least {TWO_RANKS} times the tokens/s of one, with DDP")
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


@aim(f"with all observers on a step takes at most {WATCHED} of one with none")
def watching_costs_little(df: pandas.DataFrame):
    """Cost of all observers relative to the same steps with none, for any backend."""
    _needs_an_h200(df)
    planned = table.over_tokens(df, "observing", variant=None)
    planned = planned[planned["model"] == AIMED]
    rows = _with(planned, "median", "a step with them")
    found = {f"{row.backend} T {row.x_value}": round(row.median, 3) for row in rows.itertuples()}
    worst = max(found.values())
    return f"{worst:.3f}", worst <= WATCHED, found, metrics.unmeasured(planned, table.POINT)


@aim(f"after {LOSS_STEPS} steps NSA's loss is within {LOSS_SHARE:.0%} of the twin's")
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
        raise Undecided(f"T {TOKENS} has no value")
    return float(line[TOKENS])


def _with(rows: pandas.DataFrame, column: str, what: str) -> pandas.DataFrame:
    """Rows that have a value; NotHere if there are no rows, Undecided if none has a value."""
    if not len(rows):
        raise NotHere(f"{what} was not to be measured in this run")
    if rows[column].isna().all():
        raise Undecided(f"{what} was to be measured and has no value")
    return rows.dropna(subset=column)


def _needs_an_h200(df: pandas.DataFrame) -> None:
    needs_h200(df["device"].iloc[0] if metrics.on_gpu(df) else "", CPU)


def _none_of(df: pandas.DataFrame, metric: str, it: str, unmeasured: str):
    """Find that this count is 0 in every cell."""
    rows = table.over_tokens(df, metric, variant=None).dropna(subset="median")
    if not len(rows):
        raise Undecided(unmeasured)
    found = {_cell(row): int(row.median) for row in rows.itertuples()}
    if counted := {cell: count for cell, count in found.items() if count}:
        return f"; {it} {', '.join(counted)}", False, counted
    return f", in {len(found)} cells", True, {"cells": len(found)}, _lost(df, metric, "step")


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
