"""Facts of the settlement that the reports' own figures decide, recomputed from them.

Microseconds an operation stand on operations that were counted in the case study's code, of which
no record is here; the loop rebuilt here dispatches about half as many (335,529 at T 1024 where
725,490 are quoted), so no time of the one is compared with a count of the other.
"""

import math
from collections.abc import Callable
from functools import cache
from statistics import correlation, linear_regression, mean, median, stdev
from typing import Any

from nsa.experiments.case_study.figures import estimate_mib, held_out_us
from nsa.experiments.case_study.loop.design import MIB, Design, parameters, peak_mib, production
from nsa.experiments.case_study.loop.subject import PrintSchedule
from nsa.experiments.case_study.settlement.sources import Sources
from nsa.workbook.scaling import local_exponents

shapes = cache(peak_mib)
BLOCK = 512  # bytes that the allocator rounds up to


def forced_branch_mib(design: Design, tokens: int) -> float:
    """What one branch alone does not keep, with gates that are constants: each token's output of
    three branches, and what the gate's MLP keeps of it (its input, and before and after SiLU)."""
    gate = (design.groups * design.head_dim, *2 * [design.groups * design.head_dim // 2])
    each = 3 * 4 * design.dim + sum(BLOCK * -(-4 * n // BLOCK) for n in gate)
    return design.layers * tokens * each / MIB


def operations(see: Sources, layers: int, tokens: int, design: str = "production") -> int:
    return layers * see["PER_LAYER"][design, tokens]


def known_us(see: Sources) -> list[float]:
    """Microseconds an operation of every known timing, outliers included."""
    each = see["ALL_TIMINGS"]
    return [1e6 * t.seconds / operations(see, t.layers, t.tokens, t.design) for t in each]


def furthest(ratios: Any) -> float:
    """The largest of |ratio - 1|."""
    return max(abs(ratio - 1) for ratio in ratios)


def _held_out(see: Sources) -> float:
    each = known_us(see)
    return furthest(p / us for p, us in zip(held_out_us(each), each, strict=True))


def _square(see: Sources) -> float:
    xs, ys = zip(*see["MEMORY_MIB"].items(), strict=True)
    return linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys]).slope


def _estimates(see: Sources) -> list[float]:
    coefficients = see["ESTIMATOR"]
    return [estimate_mib(t, coefficients) / mib for t, mib in see["MEMORY_MIB"].items()]


def _recovered(see: Sources) -> float:
    published = see["PUBLISHED_ESTIMATE_MB"].items()
    return furthest(estimate_mib(t, see["ESTIMATOR"]) / mb for t, mb in published)


def _four(see: Sources) -> list[float]:
    (a, b), (c, d) = see["FOUR_PEAKS_MB"].values()
    return [a, b, c, d]


def _branch(see: Sources) -> float:
    a, b, c, d = _four(see)
    predicted = forced_branch_mib(production(5), 2048)
    return max(abs(a - b - predicted), abs(c - d - predicted))


def _branch_elsewhere(see: Sources) -> float:
    return max(
        abs(both - forced - forced_branch_mib(production(5), tokens))
        for tokens, (both, forced) in see["FORCED_MB"].items()
    )


def _steps_line(see: Sources) -> float:
    quoted = set(see["LAST_LINE"].values())
    told = PrintSchedule().last_line(12, 11)
    return max(abs(step - told) for step in quoted)


def _linear(see: Sources) -> float:
    scaling = see["LAYER_SCALING_S"]
    return correlation(list(scaling), [total for _, _, total in scaling.values()]) ** 2


def _twelve(see: Sources) -> float:
    totals = {layers: total for layers, (_, _, total) in see["LAYER_SCALING_S"].items()}
    twelve = totals.pop(12)
    line = linear_regression(list(totals), list(totals.values()))
    return twelve / (line.intercept + 12 * line.slope)


def too_short(see: Sources) -> float:
    """Of each step that was called a hang, its seconds over its limit; the least.

    What is known of that very configuration, or of the same with half its batch.
    """
    known = [((t.layers, t.tokens), t.seconds) for t in see["ALL_TIMINGS"]]
    return min(
        seconds / limit
        for _, *sizes, _, limit in see["DEADLINES"]
        for known_sizes, seconds in known
        if known_sizes == tuple(sizes)
    )


def _cpu_test(see: Sources) -> float:
    return see["CPU_TEST_S"] / min(limit for what, *_, limit in see["DEADLINES"] if "CPU" in what)


def _slow(see: Sources) -> float:
    """Minutes between two lines, 20 steps, of 12 layers at T 512: the least known of its step."""
    least = min(known_us(see)) * operations(see, 12, 512) / 1e6
    return 20 * least / see["LONGEST_LIMIT_S"]


def _silence(see: Sources) -> float:
    speed = next(speed for tokens, speed, _ in see["TOKENS_PER_S"] if tokens == 1024)
    return 15 * 1024 / speed / see["LONGEST_LIMIT_S"]


def _own_speed(see: Sources) -> float:
    said = next(speed for tokens, speed, _ in see["TOKENS_PER_S"] if tokens == 256)
    return said / (256 / see["LAYER_SCALING_S"][12][2])


def _ran(see: Sources, column: int) -> list[float]:
    return [row[column] for row in see["BACKENDS_2048"].values() if row is not None]


def _packing(see: Sources) -> float:
    """Student's t of the overheads."""
    costs = list(see["SAFE_PACKING_PERCENT"].values())
    return abs(mean(costs)) / (stdev(costs) / math.sqrt(len(costs)))


def _toy(see: Sources) -> float:
    best = max(rate for tokens, rate, _ in see["TOKENS_PER_S"] if tokens == 128)
    return see["TOY_RUN_TOKENS_PER_S"] / best


def _gpus(see: Sources) -> float:
    by_gpu: dict[str, list[float]] = {}
    for timing, us in zip(see["ALL_TIMINGS"], known_us(see), strict=True):
        by_gpu.setdefault(timing.gpu, []).append(us)
    a100, rtx = (median(by_gpu[gpu]) for gpu in ("A100", "RTX 3090"))
    return rtx / a100


def _sharded(see: Sources) -> float:
    """GiB of 12 layers at T 2048 with a right window, had FSDP sharded weights away altogether."""
    return (
        shapes(12, 2048, right_window=True) / 1024
        - 4 * parameters(production()) / 2**30
        - see["A100_GIB"]
    )


def _steps_apart(see: Sources) -> float:
    return len(set(see["STEPS_REACHED"].values()))


def _named(see: Sources) -> float:
    names = see["PARAMETERS"]
    return sum(any(real in name for real in names) for name in see["NAMED_MISSING"])


@cache
def tensors(layers: int) -> int:
    """Parameter tensors of the rebuilt production design."""
    import torch

    from nsa.experiments.case_study.loop.model import LoopModel

    with torch.device("meta"):
        return sum(1 for _ in LoopModel(production(layers)).parameters())


VALUES: dict[str, Callable[[Sources], float]] = {
    "grows-as-square": _square,
    "ends-as-square": lambda see: local_exponents(*zip(*see["MEMORY_MIB"].items(), strict=True))[
        -1
    ],
    "copies-explain": lambda see: furthest(
        shapes(*at) / mib for at, mib in see["PEAKS_MIB"].items()
    ),
    "window-was-truncated": lambda see: (
        shapes(5, 2048, right_window=True) / see["MEMORY_MIB"][2048]
    ),
    "estimator-recovered": _recovered,
    "estimator-at-2048": lambda see: furthest(_estimates(see)[-1:]),
    "estimator-elsewhere": lambda see: furthest(_estimates(see)),
    "backward-is-151": lambda see: (
        see["PRODUCTION_PEAK_MIB"] * MIB / 1e9 / see["PRODUCTION_GB"]["backward"]
    ),
    "loop-fits": lambda see: see["PRODUCTION_PEAK_MIB"] / 1024 / see["A100_GIB"],
    "right-window-does-not-fit": lambda see: (
        shapes(12, 2048, right_window=True) / 1024 / see["A100_GIB"]
    ),
    "sharding-makes-it-fit": _sharded,
    "four-peaks-agree": lambda see: max(_four(see)) - min(_four(see)),
    "two-by-two": lambda see: abs(
        (_four(see)[0] - _four(see)[1]) - (_four(see)[2] - _four(see)[3])
    ),
    "forced-branch-by-shapes": _branch,
    "forced-branch-elsewhere": _branch_elsewhere,
    "memory-in-use": lambda see: see["USED_GB"][0] / see["USED_GB"][1],
    "one-constant": _held_out,
    "seconds-follow-layers": _linear,
    "twelve-layers-end": _twelve,
    "limits-too-short": too_short,
    "cpu-test-too-long": _cpu_test,
    "silence-outlasts": _silence,
    "slow-without-a-hang": _slow,
    "speed-is-66": _own_speed,
    "one-step-for-all": _steps_apart,
    "too-fast-for-12-layers": _toy,
    "rtx-is-slower": _gpus,
    "gpu-waits": lambda see: see["BUSY"]["GPU"],
    "cpu-works": lambda see: see["BUSY"]["CPU"],
    "fsdp-sped-up-the-loop": lambda see: (
        see["FSDP_TOKENS_PER_S"] * max(t.seconds for t in see["TIMINGS"] if t.layers == 12) / 2048
    ),
    "backends-one-memory": lambda see: max(_ran(see, 0)) - min(_ran(see, 0)),
    "backends-one-time": lambda see: max(_ran(see, 1)) / min(_ran(see, 1)),
    "backends-one-graph": lambda see: len(set(see["BACKEND_NODES"].values())),
    "branches-one-graph": lambda see: len(set(see["BRANCH_NODES"].values())),
    "packing-costs": _packing,
    "all-27-ended": lambda see: len(see["UNFINISHED"]),
    "twelve-layers-arrived": lambda see: abs(sum(see["ARRIVED"]["archive"]) - tensors(12)),
    "two-layers-arrived": lambda see: abs(sum(see["ARRIVED"]["archive"]) - tensors(2)),
    "missing-names-exist": _named,
    "line-is-the-schedules": _steps_line,
    "one-line-two-readings": lambda see: abs(
        see["LAST_LINE"]["hang"] - see["LAST_LINE"]["no hang"]
    ),
    "heartbeat-goes-on": lambda see: min(
        arm["heartbeat"] - arm["stdout"] for arm in see["RERUN"].values()
    ),
    "rerun-with-aux-stats": lambda see: (
        see["RERUN"]["with"]["heartbeat"] - see["RERUN"]["without"]["heartbeat"]
    ),
    "hook-raised": lambda see: see["BUCKET_HOOK_RAISED"],
    "parity-passed-nonsense": lambda see: see["PARITY_ERROR"] / see["PARITY_LIMIT"],
    "source-hash-kept": lambda see: see["RECORDS"]["source hash"],
    "GPU-processes-kept": lambda see: see["RECORDS"]["GPU processes"],
    "clocks-kept": lambda see: see["RECORDS"]["clocks"],
    "free-GPU-kept": lambda see: see["RECORDS"]["GPU without processes"],
    "strict-fallback-kept": lambda see: see["RECORDS"]["strict fallback"],
    "strict-fallback-failure-kept": lambda see: see["RECORDS"]["strict fallback failed"],
}
