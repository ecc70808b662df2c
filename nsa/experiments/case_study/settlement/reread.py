"""Facts of the settlement that the reports' own figures decide, recomputed from them."""

import math
from collections.abc import Callable
from functools import cache
from statistics import mean, stdev

from nsa.experiments.case_study import figures as case_study
from nsa.experiments.case_study.loop.design import production
from nsa.experiments.case_study.loop.operations import BAND_US, PER_LAYER, TIMINGS
from nsa.experiments.case_study.loop.saved import held, with_correct_window
from nsa.experiments.case_study.settlement.fact import Fact
from nsa.workbook.scaling import local_exponents

MIB = 2**20
FAST_US, SLOW_US = BAND_US


@cache
def reread() -> tuple[Fact, ...]:
    """Every fact of the tables."""
    return tuple(make() for make in _TABLES)


def _table(name: str, sentence: str, holds: bool, tables: str, seen: str = "") -> Fact:
    return Fact(name, sentence, bool(holds), tuple(f"table:{t}" for t in tables.split()), seen)


def _not_quadratic() -> Fact:
    tokens, mib = zip(*case_study.MEMORY_MIB.items(), strict=True)
    local = local_exponents(tokens, mib)
    return _table(
        "not-quadratic",
        "local exponents of the memory table are " + ", ".join(f"{p:.2f}" for p in local)
        + ": never 2, and below 1 at the end",
        all(p < 1.9 for p in local) and local[-1] < 1, "MEMORY_MIB",
    )  # fmt: skip


def _copies() -> Fact:
    ratios = [held(production(5), t).total / MIB / m - 1 for t, m in case_study.MEMORY_MIB.items()]
    ratios.append(held(production(12), 2048).total / MIB / case_study.PRODUCTION_PEAK_MIB - 1)
    return _table(
        "copies-explain-the-table",
        f"copies of keys and values, one set a token, give all six peaks within 1.5 %, with no "
        f"fitted slope: {', '.join(f'{r:+.1%}' for r in ratios)}",
        all(abs(r) < 0.015 for r in ratios), "MEMORY_MIB PRODUCTION_PEAK_MIB",
    )  # fmt: skip


def _truncated_window() -> Fact:
    right = held(with_correct_window(production(5)), 2048).total / MIB
    said = case_study.MEMORY_MIB[2048]
    return _table(
        "truncated-window",
        f"with a window that sees its w keys the peak at 2048 would be {right:,.0f} MiB and not "
        f"{said:,.0f}: the table was made with a window that loses them",
        right > 1.5 * said, "MEMORY_MIB",
    )  # fmt: skip


def _estimator_recovered() -> Fact:
    off = [case_study.ESTIMATE_MIB[t] / mb - 1
           for t, mb in case_study.PUBLISHED_ESTIMATE_MB.items()]  # fmt: skip
    return _table(
        "estimator-recovered", "145.2 + 0.005115 T^2 gives its four estimates to 0.1 %",
        all(abs(x) <= 1e-3 for x in off), "PUBLISHED_ESTIMATE_MB ESTIMATE_MIB",
    )  # fmt: skip


def _estimator_crosses() -> Fact:
    errors = {t: case_study.ESTIMATE_MIB[t] / m - 1 for t, m in case_study.MEMORY_MIB.items()}
    beyond = (145.2 + 0.005115 * 4096**2) / (held(production(5), 4096).total / MIB) - 1
    return _table(
        "estimator-crosses",
        f"it is off by {min(errors.values()):.0%} at worst, by {errors[2048]:+.0%} at 2048, and "
        f"would be by {beyond:+.0%} at 4096: 2048 is where two curves cross",
        min(errors.values()) < -0.7 and errors[2048] > 0 and beyond > 0.9,
        "ESTIMATE_MIB MEMORY_MIB",
    )  # fmt: skip


def _backward_observed() -> Fact:
    claimed = case_study.PRODUCTION_GB["backward"]
    observed = case_study.PRODUCTION_PEAK_MIB * MIB / 1e9
    return _table(
        "backward-observed",
        f"the whole step's peak was seen at {observed:.1f} GB, a third of the {claimed} GB that "
        "were projected for its backward",
        observed < 0.4 * claimed, "PRODUCTION_GB PRODUCTION_PEAK_MIB",
    )  # fmt: skip


def _production_fits() -> Fact:
    gib = held(production(12), 2048).total / 2**30
    return _table(
        "production-fits",
        f"12 layers at 2048 hold {gib:.1f} GiB from shapes, without checkpointing, of an A100's "
        f"{case_study.A100_GIB}",
        gib < case_study.A100_GIB, "A100_GIB",
    )  # fmt: skip


def _one_constant() -> Fact:
    each = [timing.microseconds for timing in TIMINGS]
    return _table(
        "one-constant",
        f"nine timings, two GPUs, seconds apart by a factor of "
        f"{max(t.seconds for t in TIMINGS) / min(t.seconds for t in TIMINGS):.0f}: "
        f"{min(each):.1f} to {max(each):.1f} us an operation",
        all(FAST_US < us < SLOW_US for us in each), "TIMINGS PER_LAYER",
    )  # fmt: skip


def _versions() -> Fact:
    old = [t.microseconds for t in TIMINGS if t.tokens == 256]  # torch 2.4.0
    new = [t.microseconds for t in TIMINGS if t.tokens != 256]  # torch 2.5.1
    overlap = max(min(old), min(new)) < min(max(old), max(new))
    return _table(
        "versions-share-the-constant",
        f"us an operation under torch 2.4.0 ({min(old):.1f} to {max(old):.1f}) and 2.5.1 "
        f"({min(new):.1f} to {max(new):.1f}) overlap",
        overlap, "TIMINGS",
    )  # fmt: skip


def _time_is_linear() -> Fact:
    layers, seconds = zip(*((n, s[2]) for n, s in case_study.LAYER_SCALING_S.items()), strict=True)
    n, mx, my = len(layers), mean(layers), mean(seconds)
    slope = sum((x - mx) * (y - my) for x, y in zip(layers, seconds, strict=True)) / sum(
        (x - mx) ** 2 for x in layers
    )
    rest = sum((y - my - slope * (x - mx)) ** 2 for x, y in zip(layers, seconds, strict=True))
    squared = 1 - rest / sum((y - my) ** 2 for y in seconds)
    return _table(
        "time-is-linear",
        f"seconds are linear in layers, {slope:.2f} each, R^2 {squared:.3f} over {n} points: a "
        "threshold in layers is one in seconds",
        squared > 0.99, "LAYER_SCALING_S",
    )  # fmt: skip


def _deadlines() -> Fact:
    texts, ok = [], True
    for what, layers, tokens, _, deadline in case_study.DEADLINES:
        least = layers * PER_LAYER["production", tokens] * FAST_US * 1e-6
        # What is known of that very configuration counts more than the fastest constant.
        own = [t.seconds for t in TIMINGS if (t.layers, t.tokens) == (layers, tokens)]
        least = max([least, *own])
        ok &= least > deadline
        texts.append(f"{what} {least:.0f} s against {deadline:.0f}")
    return _table(
        "deadlines-too-short",
        f"a step of batch 1 takes longer than the limit that called it a hang: {', '.join(texts)}",
        ok, "DEADLINES PER_LAYER TIMINGS",
    )  # fmt: skip


def _silence() -> Fact:
    step = 1024 / 20.0
    return _table(
        "silence",
        f"20 tokens/s at T 1024 are {step:.1f} s a step: after step 5 the console is silent for 15 "
        f"of them, {15 * step / 60:.1f} minutes",
        15 * step > 600, "TOKENS_PER_S",
    )  # fmt: skip


def _slow() -> Fact:
    small, large = (12 * PER_LAYER["production", t] * 1e-6 for t in (512, 2048))
    return _table(
        "slow-without-a-hang",
        f"12 layers take {small * FAST_US:.0f} to {small * SLOW_US:.0f} s a step at S = 512 and "
        f"{large * FAST_US:.0f} to {large * SLOW_US:.0f} s at 2048, batch 1, and a line is due "
        f"every 20 steps: {20 * small * FAST_US / 60:.0f} and {20 * large * FAST_US / 60:.0f} "
        "minutes at least",
        20 * small * FAST_US > 600, "PER_LAYER",
    )  # fmt: skip


def _thirteen() -> Fact:
    speed = 256 / case_study.LAYER_SCALING_S[12][2]
    return _table(
        "13-tokens-a-second", f"256 tokens in its own 19.343 s are {speed:.1f} tokens/s",
        66 / speed > 4, "LAYER_SCALING_S TOKENS_PER_S",
    )  # fmt: skip


def _not_always() -> Fact:
    reached = case_study.STEPS_REACHED
    steps = sorted(set(reached.values()))
    return _table(
        "not-always-5",
        f"of {len(reached)} variants {sum(s == 5 for s in reached.values())} stopped at step 5, "
        f"the others at {', '.join(str(s) for s in steps if s != 5)}: the slower, the earlier",
        len(steps) > 1, "STEPS_REACHED",
    )  # fmt: skip


def _identical() -> Fact:
    ran = [x for x in case_study.BACKENDS_2048.values() if x is not None]
    memory, seconds = zip(*ran, strict=True)
    return _table(
        "identical-backends",
        f"{len(ran)} backends report one memory to 0.1 MB, and times within "
        f"{max(seconds) / min(seconds) - 1:.1%}: one program under {len(ran)} names",
        len(set(memory)) == 1 and max(seconds) / min(seconds) < 1.02, "BACKENDS_2048",
    )  # fmt: skip


def _four_peaks() -> Fact:
    peaks = case_study.FOUR_PEAKS_MB
    return _table(
        "four-peaks-differ",
        f"they lie {max(peaks) / min(peaks) - 1:.1%} apart, {max(peaks) - min(peaks):.0f} MB, "
        "where three backends agree to 0.1",
        max(peaks) - min(peaks) > 100, "FOUR_PEAKS_MB BACKENDS_2048",
    )  # fmt: skip


def _safe_packing() -> Fact:
    costs = list(case_study.SAFE_PACKING_PERCENT.values())
    error = stdev(costs) / math.sqrt(len(costs))
    return _table(
        "safe-packing-is-noise",
        f"its three overheads have both signs: {mean(costs):+.1f} % on average, standard error "
        f"{error:.1f}",
        min(costs) < 0 < max(costs) and abs(mean(costs)) < error, "SAFE_PACKING_PERCENT",
    )  # fmt: skip


def _parity_missing() -> Fact:
    missing = [name for name, x in case_study.BACKENDS_2048.items() if x is None]
    return _table(
        "parity-missing", f"its own table has no figures for {', '.join(missing)}",
        bool(missing), "BACKENDS_2048",
    )  # fmt: skip


def _twelve_layers() -> Fact:
    arrived, missing = case_study.ARRIVED["archive"]
    by_layers = {layers: _tensors(layers) for layers in (2, 12)}
    return _table(
        "twelve-layers-arrived",
        f"its list has {arrived} gradients; the design has {by_layers[2]} tensors with 2 layers "
        f"and {by_layers[12]} with 12",
        arrived + missing == by_layers[12] != by_layers[2], "ARRIVED",
    )  # fmt: skip


@cache
def _tensors(layers: int) -> int:
    import torch

    from nsa.experiments.case_study.loop.model import LoopModel

    with torch.device("meta"):
        return sum(1 for _ in LoopModel(production(layers)).parameters())


def _example() -> Fact:
    arrived, missing = case_study.ARRIVED["example"]
    return _table(
        "example-adds-up", f"{arrived} arrived and {missing} missing are the {_tensors(12)} of 12 "
        "layers: the count fits, the names cannot be checked", arrived + missing == _tensors(12),
        "ARRIVED",
    )  # fmt: skip


def _toy() -> Fact:
    best = 128 / (12 * PER_LAYER["production", 128] * FAST_US * 1e-6)
    said = case_study.TOY_RUN_TOKENS_PER_S
    return _table(
        "too-fast-for-12-layers",
        f"12 layers of that loop reach {best:.0f} tokens/s at most at S = 128, the run {said:.0f}",
        said > 10 * best, "TOY_RUN_TOKENS_PER_S PER_LAYER",
    )  # fmt: skip


def _not_one_program() -> Fact:
    us = 1e6 * 128 / case_study.LAPTOP_TOKENS_PER_S / (12 * PER_LAYER["production", 128])
    return _table(
        "not-one-program",
        f"for the loop's operations the laptop would need {us:.2f} us each, where the fastest of "
        f"nine timings is {min(t.microseconds for t in TIMINGS):.1f}: it ran something else",
        us < 1.0, "LAPTOP_TOKENS_PER_S PER_LAYER TIMINGS",
    )  # fmt: skip


_TABLES: tuple[Callable[[], Fact], ...] = (
    _not_quadratic, _copies, _truncated_window, _estimator_recovered, _estimator_crosses,
    _backward_observed, _production_fits, _one_constant, _versions, _time_is_linear, _deadlines,
    _silence, _slow, _thirteen, _not_always, _identical, _four_peaks, _safe_packing,
    _parity_missing, _twelve_layers, _example, _toy, _not_one_program,
)  # fmt: skip
