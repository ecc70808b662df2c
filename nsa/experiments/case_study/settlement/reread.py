"""Facts of the settlement that the reports' own figures decide, recomputed from them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from statistics import correlation, linear_regression, mean, stdev

from nsa.experiments.case_study import figures as case_study
from nsa.experiments.case_study.figures import BAND_US, ESTIMATE_MIB, MEMORY_MIB, PER_LAYER, TIMINGS
from nsa.experiments.case_study.loop.design import MIB, peak_mib, production
from nsa.workbook.scaling import local_exponents

FAST_US, SLOW_US = BAND_US


@dataclass(frozen=True)
class Fact:
    """A sentence whose numbers do not move from run to run, and whether it holds.

    holds: None where its trial or run is not there. evidence: ids, "table:...", "trial:..." or
    "run:...". seen: the numbers behind it, which may move.
    """

    name: str
    sentence: str
    holds: bool | None
    evidence: tuple[str, ...]
    seen: str = ""


@cache
def reread() -> tuple[Fact, ...]:
    """Every fact of the tables."""
    return tuple(
        Fact(name, sentence, bool(holds), tuple(f"table:{table}" for table in tables.split()))
        for name, tables, holds, sentence in chain(_memory(), _time(), _comparisons(), _lists())
    )


Read = Iterator[tuple[str, str, bool, str]]  # name, tables, whether it holds, sentence


# fmt: off
def _memory() -> Read:
    local = local_exponents(*zip(*MEMORY_MIB.items(), strict=True))
    yield ("not-quadratic", "MEMORY_MIB", all(p < 1.9 for p in local) and local[-1] < 1,
           f"local exponents of the memory table are {', '.join(f'{p:.2f}' for p in local)}: never "
           "2, and below 1 at the end")

    ratios = [peak_mib(*sizes) / mib - 1 for sizes, mib in case_study.PEAKS_MIB.items()]
    yield ("copies-explain-the-table", "MEMORY_MIB PRODUCTION_PEAK_MIB",
           all(abs(r) < 0.015 for r in ratios),
           "copies of keys and values, one set a token, give all six peaks within 1.5 %, with no "
           f"fitted slope: {', '.join(f'{r:+.1%}' for r in ratios)}")

    right, said = peak_mib(5, 2048, right_window=True), MEMORY_MIB[2048]
    yield ("truncated-window", "MEMORY_MIB", right > 1.5 * said,
           f"with a window that sees its w keys the peak at 2048 would be {right:,.0f} MiB and not "
           f"{said:,.0f}: the table was made with a window that loses them")

    published = case_study.PUBLISHED_ESTIMATE_MB
    yield ("estimator-recovered", "PUBLISHED_ESTIMATE_MB ESTIMATE_MIB",
           all(abs(ESTIMATE_MIB[t] / mb - 1) <= 1e-3 for t, mb in published.items()),
           "145.2 + 0.005115 T^2 gives its four estimates to 0.1 %")

    errors = {t: ESTIMATE_MIB[t] / m - 1 for t, m in MEMORY_MIB.items()}
    worst, beyond = min(errors.values()), case_study.estimate_mib(4096) / peak_mib(5, 4096) - 1
    yield ("estimator-crosses", "ESTIMATE_MIB MEMORY_MIB",
           worst < -0.7 and errors[2048] > 0 and beyond > 0.9,
           f"it is off by {worst:.0%} at worst, by {errors[2048]:+.0%} at 2048, and would be by "
           f"{beyond:+.0%} at 4096: 2048 is where two curves cross")

    claimed = case_study.PRODUCTION_GB["backward"]
    observed = case_study.PRODUCTION_PEAK_MIB * MIB / 1e9
    yield ("backward-observed", "PRODUCTION_GB PRODUCTION_PEAK_MIB", observed < 0.4 * claimed,
           f"the whole step's peak was seen at {observed:.1f} GB, a third of the {claimed} GB that "
           "were projected for its backward")

    gib = peak_mib(12, 2048) / 1024
    yield ("production-fits", "A100_GIB", gib < case_study.A100_GIB,
           f"12 layers at 2048 hold {gib:.1f} GiB from shapes, without checkpointing, of an A100's "
           f"{case_study.A100_GIB}")


def _time() -> Read:
    each, seconds = [t.microseconds for t in TIMINGS], [t.seconds for t in TIMINGS]
    yield ("one-constant", "TIMINGS PER_LAYER", all(FAST_US < us < SLOW_US for us in each),
           "nine timings, two GPUs, seconds apart by a factor of "
           f"{max(seconds) / min(seconds):.0f}: {min(each):.1f} to {max(each):.1f} us an operation")

    old = [t.microseconds for t in TIMINGS if t.tokens == 256]  # torch 2.4.0
    new = [t.microseconds for t in TIMINGS if t.tokens != 256]  # torch 2.5.1
    yield ("versions-share-the-constant", "TIMINGS",
           max(min(old), min(new)) < min(max(old), max(new)),
           f"us an operation under torch 2.4.0 ({min(old):.1f} to {max(old):.1f}) and 2.5.1 "
           f"({min(new):.1f} to {max(new):.1f}) overlap")

    layers = list(case_study.LAYER_SCALING_S)
    totals = [total for _, _, total in case_study.LAYER_SCALING_S.values()]
    slope, squared = linear_regression(layers, totals).slope, correlation(layers, totals) ** 2
    yield ("time-is-linear", "LAYER_SCALING_S", squared > 0.99,
           f"seconds are linear in layers, {slope:.2f} each, R^2 {squared:.3f} over {len(layers)} "
           "points: a threshold in layers is one in seconds")

    least = {}  # seconds of a step, by what called it a hang
    for what, deep, tokens, _, deadline in case_study.DEADLINES:
        # What is known of that very configuration counts more than the fastest constant.
        own = [t.seconds for t in TIMINGS if (t.layers, t.tokens) == (deep, tokens)]
        by_operations = deep * PER_LAYER["production", tokens] * FAST_US * 1e-6
        least[what] = max([by_operations, *own]), deadline
    yield ("deadlines-too-short", "DEADLINES PER_LAYER TIMINGS",
           all(step > deadline for step, deadline in least.values()),
           "a step of batch 1 takes longer than the limit that called it a hang: "
           + ", ".join(f"{what} {s:.0f} s against {d:.0f}" for what, (s, d) in least.items()))

    step = 1024 / 20.0
    yield ("silence", "TOKENS_PER_S", 15 * step > 600,
           f"20 tokens/s at T 1024 are {step:.1f} s a step: after step 5 the console is silent for "
           f"15 of them, {15 * step / 60:.1f} minutes")

    small, large = (12 * PER_LAYER["production", t] * 1e-6 for t in (512, 2048))
    yield ("slow-without-a-hang", "PER_LAYER", 20 * small * FAST_US > 600,
           f"12 layers take {small * FAST_US:.0f} to {small * SLOW_US:.0f} s a step at S = 512 and "
           f"{large * FAST_US:.0f} to {large * SLOW_US:.0f} s at 2048, batch 1, and a line is due "
           f"every 20 steps: {20 * small * FAST_US / 60:.0f} and {20 * large * FAST_US / 60:.0f} "
           "minutes at least")

    speed = 256 / case_study.LAYER_SCALING_S[12][2]
    yield ("13-tokens-a-second", "LAYER_SCALING_S TOKENS_PER_S", 66 / speed > 4,
           f"256 tokens in its own 19.343 s are {speed:.1f} tokens/s")

    reached = list(case_study.STEPS_REACHED.values())
    others = ", ".join(map(str, sorted(set(reached) - {5})))
    yield ("not-always-5", "STEPS_REACHED", len(set(reached)) > 1,
           f"of {len(reached)} variants {reached.count(5)} stopped at step 5, the others at "
           f"{others}: the slower, the earlier")


def _comparisons() -> Read:
    ran = [x for x in case_study.BACKENDS_2048.values() if x is not None]
    memory, seconds = zip(*ran, strict=True)
    apart = max(seconds) / min(seconds)
    yield ("identical-backends", "BACKENDS_2048", len(set(memory)) == 1 and apart < 1.02,
           f"{len(ran)} backends report one memory to 0.1 MB, and times within {apart - 1:.1%}: "
           f"one program under {len(ran)} names")

    least, most = min(case_study.FOUR_PEAKS_MB), max(case_study.FOUR_PEAKS_MB)
    yield ("four-peaks-differ", "FOUR_PEAKS_MB BACKENDS_2048", most - least > 100,
           f"they lie {most / least - 1:.1%} apart, {most - least:.0f} MB, where three backends "
           "agree to 0.1")

    costs = list(case_study.SAFE_PACKING_PERCENT.values())
    error = stdev(costs) / math.sqrt(len(costs))
    yield ("safe-packing-is-noise", "SAFE_PACKING_PERCENT",
           min(costs) < 0 < max(costs) and abs(mean(costs)) < error,
           f"its three overheads have both signs: {mean(costs):+.1f} % on average, standard error "
           f"{error:.1f}")

    missing = [name for name, x in case_study.BACKENDS_2048.items() if x is None]
    yield ("parity-missing", "BACKENDS_2048", bool(missing),
           f"its own table has no figures for {', '.join(missing)}")


def _lists() -> Read:
    shallow, deep = _tensors(2), _tensors(12)
    arrived, missing = case_study.ARRIVED["archive"]
    yield ("twelve-layers-arrived", "ARRIVED", arrived + missing == deep != shallow,
           f"its list has {arrived} gradients; the design has {shallow} tensors with 2 layers and "
           f"{deep} with 12")

    arrived, missing = case_study.ARRIVED["example"]
    yield ("example-adds-up", "ARRIVED", arrived + missing == deep,
           f"{arrived} arrived and {missing} missing are the {deep} of 12 layers: the count fits, "
           "the names cannot be checked")

    operations = 12 * PER_LAYER["production", 128]
    best, said = 128 / (operations * FAST_US * 1e-6), case_study.TOY_RUN_TOKENS_PER_S
    yield ("too-fast-for-12-layers", "TOY_RUN_TOKENS_PER_S PER_LAYER", said > 10 * best,
           f"12 layers of that loop reach {best:.0f} tokens/s at most at S = 128, the run "
           f"{said:.0f}")

    us = 1e6 * 128 / case_study.LAPTOP_TOKENS_PER_S / operations
    yield ("not-one-program", "LAPTOP_TOKENS_PER_S PER_LAYER TIMINGS", us < 1.0,
           f"for the loop's operations the laptop would need {us:.2f} us each, where the fastest "
           f"of nine timings is {min(t.microseconds for t in TIMINGS):.1f}: it ran something else")


# fmt: on
def _tensors(layers: int) -> int:
    import torch

    from nsa.experiments.case_study.loop.model import LoopModel

    with torch.device("meta"):
        return sum(1 for _ in LoopModel(production(layers)).parameters())
