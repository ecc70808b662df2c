"""The sentences of the throughput notebook, each decided by rows and never by hand."""

from collections.abc import Sequence

import numpy as np
import pandas

from nsa.experiments.throughput import table as throughput_table
from nsa.workbook.claim import Claim, verdict_of

METER = 0.01
FLAT_STEPS = 100  # fewer tell growth from the first steps' settling badly
FLAT_SHARE = 0.01
POOLED = 0.1  # of a curve's steps, around the one whose seeds' spread is asked for


def all_claims(
    df: pandas.DataFrame, rows: Sequence[dict], lessons: Sequence[dict] = ()
) -> list[Claim]:
    """What must hold in any run. `rows` are those of throughput trials, `lessons` those of
    correctness.lesson_rows.learn_all; without any there is no sentence about them."""
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


def nothing_broke(df: pandas.DataFrame) -> Claim:
    """Out of memory, declined and not run are values; an exception, a crash or a hang is not."""
    rows = throughput_table.cells(df)
    bad = rows[rows["outcome"].isin(["error", "crash", "timeout"])]
    sentence = f"each of {len(rows)} training cells ran or said why it does not"
    if not (rows["outcome"] == "ok").any():
        return Claim(f"{sentence}: none ran", "FAIL" if len(bad) else "INCONCLUSIVE", {})
    found = {_cell(row): f"{row.outcome}: {row.message}" for row in bad.itertuples()}
    if found:
        return Claim(f"{sentence}; broke off: {', '.join(found)}", "FAIL", found)
    return Claim(sentence, "PASS", rows["outcome"].value_counts().to_dict())


def the_meter_is_right(df: pandas.DataFrame) -> Claim:
    """The case study's meter said 66 where its own seconds made 13.2."""
    both = [
        throughput_table.over_tokens(df, "tokens_per_second", mode, None)
        .set_index(throughput_table.POINT)["median"]
        for mode in ("step", "recount")
    ]  # fmt: skip
    off = (both[0] / both[1] - 1).abs().dropna()
    sentence = f"tokens/s by the steps' clock and by the wall's agree to {METER:.0%}"
    if not len(off):
        return Claim(f"{sentence}: nothing was measured", "INCONCLUSIVE", {})
    return Claim(
        f"{sentence}: at most {off.max():.2%} apart in {len(off)} cells",
        verdict_of(off.max() <= METER),
        {"furthest": ", ".join(map(str, off.idxmax())), "share": round(float(off.max()), 5)},
    )


def programs_are_different(rows: Sequence[dict]) -> Claim:
    """Equal path witnesses would mean that a program was compared with itself."""
    served = {row["name"]: tuple(sorted((b, *p) for b, p in row["paths"].items()))
              for row in rows if row["outcome"] == "ok" and row["paths"]}  # fmt: skip
    different = len(set(served.values()))
    return Claim(
        f"the {len(served)} attentions that ran are {different} different programs",
        verdict_of(different == len(served)) if len(served) > 1 else "INCONCLUSIVE",
        served,
    )


def nothing_is_compiled_late(df: pandas.DataFrame) -> Claim:
    """Graphs of torch.compile and kernels of Triton, in the timed steps."""
    found = _by_cell(df, "recompilations")
    sentence = "nothing is compiled after step 2"
    if not found:
        return Claim(f"{sentence}: nothing was measured", "INCONCLUSIVE", {})
    late = {cell: int(count) for cell, count in found.items() if count}
    if late:
        return Claim(f"{sentence}; it was in {', '.join(late)}", "FAIL", late)
    return Claim(f"{sentence}, in {len(found)} cells", "PASS", {"cells": len(found)})


def no_step_waits_for_the_device(df: pandas.DataFrame) -> Claim:
    """A host that waits cannot launch ahead."""
    found = _by_cell(df, "syncs")
    sentence = "the host waits for the device in no step"
    if not found:
        return Claim(f"{sentence}: not decided, no step ran on a GPU", "INCONCLUSIVE", {})
    waits = {cell: int(count) for cell, count in found.items() if count}
    if waits:
        return Claim(f"{sentence}; it does in {', '.join(waits)}", "FAIL", waits)
    return Claim(f"{sentence}, in {len(found)} cells", "PASS", {"cells": len(found)})


def memory_is_flat(df: pandas.DataFrame) -> Claim:
    """Unless the slope's 95 % interval is above 0 and all steps together add more than 1 %."""
    sentence = f"memory, the device's and the host's, grows by at most {FLAT_SHARE:.0%} in a run"
    found, grown = {}, {}
    levels = throughput_table.memory_over_steps(df)
    for mode in ("device", "host"):
        for row in throughput_table.over_tokens(df, "memory_growth", mode, None).itertuples():
            if row.steps < FLAT_STEPS or not np.isfinite(row.median):
                continue
            mine = levels[(levels["mode"] == mode) & (levels["backend"] == row.backend)]
            mine = mine[(mine["variant"] == row.variant) & (mine["model"] == row.model)]
            level = mine["median"].max()
            share = row.median * row.steps / level
            found[f"{_cell(row)}, {mode}"] = round(float(share), 5)
            if row.q20 > 0 and share > FLAT_SHARE:
                grown[f"{_cell(row)}, {mode}"] = round(float(share), 5)
    if not found:
        why = f"no cell of at least {FLAT_STEPS} steps"
        return Claim.undecided(sentence, why)
    if grown:
        return Claim(f"{sentence}; it grew in {', '.join(grown)}", "FAIL", grown)
    worst = max(found.values())
    return Claim(f"{sentence}: {worst:.2%} at most, {len(found)} series", "PASS", found)


def backends_learn_alike(df: pandas.DataFrame) -> Claim:
    """Backends on the same batches from the same weights, against what other weights change.

    Two seeds' curves cross, and where they do they would have no spread. So a step's spread is the
    root mean square over the tenth of the run around it.
    """
    table = throughput_table.losses(df)
    names = [n for n in table.index.unique("backend") if not n.startswith("dense")]
    who = ", ".join(names)
    sentence = f"the loss curves of {who or 'NSA backends'} lie within their seeds' spread"
    seeds = {name: table.loc[name].shape[0] for name in names}
    if len(names) < 2 or min(seeds.values()) < 2:
        why = "two backends with two seeds each are needed"
        return Claim.undecided(sentence, why, seeds)
    broken = [name for name in names if not np.isfinite(table.loc[name].to_numpy()).all()]
    if broken:
        return Claim(f"{sentence}; not finite: {', '.join(broken)}", "FAIL", broken)
    shared = sorted(set.intersection(*(set(table.loc[name].index) for name in names)))
    means = pandas.DataFrame({name: table.loc[name].loc[shared].mean() for name in names})
    apart = means.max(axis=1) - means.min(axis=1)
    spread = pandas.concat([_seeds_apart(table.loc[n]) for n in names], axis=1).max(axis=1)
    # Bits of fp32 where equal seeds of equal data leave no spread at all.
    ratio = apart / spread.clip(lower=1e-6)
    worst = ratio.idxmax()
    return Claim(
        f"{sentence}: at most {ratio[worst]:.2f} of it, at step {worst:.0f}",
        verdict_of(ratio[worst] <= 1),
        {"nats apart": round(float(apart[worst]), 6), "spread": round(float(spread[worst]), 6)},
    )


def lessons_are_learnt(lessons: Sequence[dict]) -> Claim:
    """What lies within reach is solved, what lies outside stays at chance, no token peeks ahead."""
    found = {row["lesson"]: row.get("accuracy") or row["outcome"] for row in lessons}
    sentence = f"NSA learns {', '.join(found)} and nothing out of its reach"
    wrong = [row["lesson"] for row in lessons if not row.get("as_expected", True)]
    lost = [row["lesson"] for row in lessons if row["outcome"] != "ok"]
    if wrong:
        return Claim(f"{sentence}; not so: {', '.join(wrong)}", "FAIL", found)
    if lost:
        return Claim(f"{sentence}; not finished: {', '.join(lost)}", "INCONCLUSIVE", found)
    return Claim(sentence, "PASS", found)


def _seeds_apart(curves: pandas.DataFrame) -> pandas.Series:
    """The spread of one backend's seeds, a row each, by step: see `backends_learn_alike`."""
    apart = curves.max() - curves.min()
    width = max(1, round(POOLED * len(apart)))
    return (apart**2).rolling(width, min_periods=1, center=True).mean().clip(lower=0) ** 0.5


def _by_cell(df: pandas.DataFrame, metric: str) -> dict[str, float]:
    rows = throughput_table.over_tokens(df, metric, variant=None).dropna(subset="median")
    return {_cell(row): row.median for row in rows.itertuples()}


def _cell(row) -> str:
    variant = f" {row.variant}" if row.variant else ""
    return f"{row.backend}{variant} T {row.x_value}"
