"""Tables of a soak: drifts with their intervals, losses across the restart, limits, settings.

Settled steps are those of a process after its first tenth and its first LEFT_OUT steps, in which
kernels are compiled, AdamW's state is made, and allocators find their sizes.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas

from workbook.rooms.soak.trials import USUAL, Estimated, Part, Setting, Soak, told
from workbook.runs.scaling import Ratio, Slope, paired_ratio, robust_slope

LEFT_OUT = 20
BLOCK = 20  # steps per point of tokens/s, a median
LEAST_MIB, LEAST_SHARE = 1.0, 0.001  # memory growth below the larger of these is ignored
# Column, description, the fewest settled steps for a meaningful slope, and True if every byte is
# counted. A process's RAM changes by pages, and a level stays for many steps: its interval is too
# narrow, and only accumulated growth is significant.
SERIES = {
    "tensors": ("tensors_mib", "what tensors hold", 10, True),
    "reserved": ("reserved_mib", "what the allocator took from the device", 10, True),
    "host": ("host_mib", "what the process holds in RAM", 100, False),
}
OF_SETTINGS = ("requested", "allocated", "reserved", "fragmentation", "inactive_split")


@dataclass(frozen=True)
class Drift:
    """Drift of a series over settled steps: its slope per step, its initial level, the number of
    steps, and the growth from its first tenth to its last."""

    slope: Slope
    level: float
    steps: int
    growth: float

    @property
    def along(self) -> float:
        """Slope times the number of steps."""
        return self.slope.value * self.steps

    @property
    def bound(self) -> float:
        """Smallest growth in MiB that counts."""
        return max(LEAST_MIB, LEAST_SHARE * self.level)


def settled(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Rows of a process without its warm-up."""
    return rows.iloc[max(LEFT_OUT, len(rows) // 10) :]


def memory(soak: Soak, series: str) -> list[Drift]:
    """Drift of one of SERIES in each process, without those that have no samples."""
    column, found = SERIES[series][0], []
    for rows in map(settled, soak.rows()):
        if rows[column].notna().any():
            first, last = _ends(rows[column].to_numpy())
            slope = robust_slope(rows["step"], rows[column])
            found.append(Drift(slope, first, len(rows), last - first))
    return found


def _ends(values: np.ndarray) -> tuple[float, float]:
    """Medians of the first and the last tenth, robust to occasional peaks."""
    width = max(1, len(values) // 10)
    return float(np.nanmedian(values[:width])), float(np.nanmedian(values[-width:]))


def tokens_s(soak: Soak) -> tuple[np.ndarray, np.ndarray]:
    """Return (step, tokens/s): the median of each BLOCK of settled steps, of both processes."""
    tokens, x, y = soak.cell.batch * soak.cell.tokens, [], []
    for rows in soak.rows():
        rows = settled(rows)
        for start in range(0, len(rows) - BLOCK + 1, BLOCK):
            block = rows.iloc[start : start + BLOCK]
            x.append(float(block["step"].mean()))
            y.append(float(tokens / block["seconds"].median()))
    return np.array(x), np.array(y)


def speed(soak: Soak) -> Drift | None:
    """Drift of tokens/s, with both processes as one series; None below three blocks."""
    x, y = tokens_s(soak)
    if len(x) < 3:
        return None
    first, last = _ends(y)
    return Drift(robust_slope(x, y), first, int(x[-1] - x[0]) + BLOCK, last - first)


def speed_share(drift: Drift) -> tuple[float, float, float]:
    """Drift over the whole run as a fraction of the start, with its interval."""
    slope, over = drift.slope, drift.steps / drift.level
    return slope.value * over, slope.low * over, slope.high * over


def across(soak: Soak) -> pandas.DataFrame:
    """Losses of the steps that both processes took: index step, columns "without", the process
    before the restart that went on, and "after", the restarted one."""
    found = [part.rows.set_index("step")["loss"] for part in soak.parts]
    if len(found) < 2:
        return pandas.DataFrame(columns=["without", "after"], dtype=float)
    both = pandas.concat(found, axis=1, join="inner").dropna()
    return both.set_axis(["without", "after"], axis=1)


def parts(soak: Soak) -> pandas.DataFrame:
    """Table with a row per process."""
    lines = []
    for part in soak.parts:
        rows, result = part.rows, part.result
        steps = f"{rows['step'].min()} to {rows['step'].max()}" if len(rows) else "none"
        lines.append(
            {"process": part.name, "steps": steps, "ended": part.outcome}
            | {"seconds": round(part.ended.seconds, 1), "checkpoint": result.get("saved", "")}
            | {"warnings": len(result.get("warnings", ()))}
        )
    return pandas.DataFrame(lines).set_index("process")


def drifts(soak: Soak) -> pandas.DataFrame:
    """Table with a row per series and process: level, slope over 1000 steps with its interval,
    growth, and the bound above which it counts. Tokens/s are omitted on a CPU."""
    lines = {}
    for name, (_, words, *_) in SERIES.items():
        for drift, part in zip(memory(soak, name), soak.parts, strict=False):
            more = {"counts from": f"{drift.bound:.3g}"}
            lines[f"{words}, MiB", part.name] = _line(drift) | more
    if soak.on_gpu and (found := speed(soak)) is not None:
        lines["tokens/s", "both"] = _line(found) | {"counts from": f"{0.01 * found.level:.3g}"}
    index = pandas.MultiIndex.from_tuples(lines, names=["series", "process"])
    return pandas.DataFrame(list(lines.values()), index=index)


def _line(drift: Drift) -> dict[str, str]:
    slope = drift.slope
    return {
        "at the start": f"{drift.level:,.2f}",
        "in 1000 steps": f"{1e3 * slope.value:+.4g}",
        "95 %": f"{1e3 * slope.low:+.3g} to {1e3 * slope.high:+.3g}",
        "growth": f"{drift.growth:+.4g}",
        "settled steps": f"{drift.steps}",
    }


@dataclass(frozen=True)
class Crossed:
    """Steps at which a growing training crossed a limit, by its own samples, and at which its guard
    acted; None for never."""

    limit_mib: float
    sampled: int | None
    told: int | None


def crossings(part: Part) -> tuple[Crossed, Crossed] | None:
    """Crossings of the warning and the stopping limit; None if no limits were set yet."""
    limits = part.result.get("limits_mib")
    if not limits:
        return None
    held = part.rows["peak_mib"].fillna(part.rows["host_mib"])
    warned = [one["step"] for one in part.result["warnings"] if one["guard"] == "memory"]
    stopped = [part.stop["step"]] if part.stop and part.stop["reason"] == "memory" else []
    found = []
    for limit, steps in zip(limits, (warned, stopped), strict=True):
        over = part.rows.loc[held >= limit, "step"]
        first = int(over.iloc[0]) if len(over) else None
        found.append(Crossed(limit, first, steps[0] if steps else None))
    return found[0], found[1]


def middle(trials: Sequence[Setting], name: str, of: str) -> float:
    """Median over turns: of "seconds", of each trial's median; of MiB, of its highest step."""
    found = [_one(trial, of) for trial in trials if trial.name == name]
    found = [value for value in found if math.isfinite(value)]
    return statistics.median(found) if found else math.nan


def _one(trial: Setting, of: str) -> float:
    values = trial.steps(of)
    if not values:
        return math.nan
    return statistics.median(values) if of == "seconds" else max(values)


def times_usual(trials: Sequence[Setting], name: str) -> Ratio | None:
    """Step time relative to the usual setting, paired by turn; None without a pair."""
    turns = {(t.name, t.turn): _one(t, "seconds") for t in trials}
    pairs = [
        (turns[USUAL, turn], value)
        for (other, turn), value in turns.items()
        if other == name and value > 0 and turns.get((USUAL, turn), math.nan) > 0
    ]
    return paired_ratio(*zip(*pairs, strict=True)) if pairs else None


def settings(trials: Sequence[Setting], estimated: Sequence[Estimated] = ()) -> pandas.DataFrame:
    """Table with a row per setting: MiB at the highest settled step, the estimates, and step time
    relative to the usual setting. Columns without any value are dropped."""
    lines, said = {}, {one.name: one for one in estimated}
    for name in dict.fromkeys([*(trial.name for trial in trials), *said]):
        line = {f"{of.replace('_', ' ')}, MiB": middle(trials, name, of) for of in OF_SETTINGS}
        if name in said:
            line["foretold allocated, MiB"] = said[name].allocated
            line["foretold reserved, MiB"] = said[name].reserved
        line["step, ms"] = 1e3 * middle(trials, name, "seconds")
        line = {what: "" if math.isnan(x) else f"{x:,.1f}" for what, x in line.items()}
        times = times_usual(trials, name)
        line["times usual"] = "" if name == USUAL or times is None else str(times)
        bad = [t.ended.status for t in trials if t.name == name and t.ended.status != "ok"]
        line["ended otherwise"] = ", ".join(bad) or (said[name].why if name in said else "")
        lines[told(name)] = line
    table = pandas.DataFrame.from_dict(lines, orient="index")
    return table.loc[:, (table != "").any()]


def facts(soak: Soak, planted: Part) -> list[str]:
    """Machine-independent lines, for the same parameters."""
    counted = ", ".join(f"{len(part.rows)} steps" for part in soak.parts)
    lines = [f"processes: {[part.outcome.partition(':')[0] for part in soak.parts]}, {counted}"]
    lines.append(f"parameters: {soak.parts[0].result.get('parameters')}")
    lines.append(f"steps that both processes took: {len(across(soak))}")
    stop = planted.stop or {}
    lines.append(f"a training that grows: ended by {stop.get('reason', 'nobody')}, with a "
                 f"checkpoint: {planted.saved is not None}")  # fmt: skip
    return lines


def to_metrics(soak: Soak, planted: Part, trials: Sequence[Setting]) -> list[dict]:
    """Rows for metrics.csv: "memory" and "tokens_per_second" over steps, in at most 50 windows per
    process, their drifts, and the memory of each setting."""
    cell = soak.cell
    base = {"operation": "training_step", "backend": cell.backend, "device": cell.device}
    config = {"preset": cell.preset, "layers": cell.config().layers, "tokens": cell.tokens}
    config |= {"batch": cell.batch, "precision": cell.precision, "checkpoint": cell.checkpoint}
    config |= {"steps": soak.steps, "outcome": "ok" if soak.whole else "; ".join(
        part.outcome for part in soak.parts)}  # fmt: skip

    def row(metric, unit, value, *, low=None, high=None, mode="step", step=None, **more):
        at = {} if step is None else {"x_name": "step", "x_value": step}
        numbers = {"median": value, "q20": low, "q80": high}
        told = {"metric": metric, "unit": unit, "mode": mode, "config": config | more}
        return base | at | numbers | told

    found = []
    for number, rows in enumerate(soak.rows()):
        for name, (column, *_) in SERIES.items():
            for places in np.array_split(np.arange(len(rows)), min(50, max(1, len(rows)))):
                block = rows.iloc[places]
                if block[column].notna().any():
                    at, value = block["step"].mean(), block[column].median()
                    found.append(row("memory", "MiB", value, mode=name, step=at, process=number))
        for name in SERIES:
            for drift in memory(soak, name)[number : number + 1]:
                ends = {"low": drift.slope.low, "high": drift.slope.high, "process": number}
                growth = ("memory_growth", "MiB/step", drift.slope.value)
                found.append(row(*growth, mode=name, **ends))
    for at, value in zip(*tokens_s(soak), strict=True):
        found.append(row("tokens_per_second", "tokens/s", value, step=at))
    if (drift := speed(soak)) is not None:
        share, low, high = speed_share(drift)
        found.append(row("tokens_per_second_drift", "1", share, low=low, high=high))
    for limit in crossings(planted) or ():
        more = {"planted": True, "sampled": limit.sampled, "told": limit.told}
        found.append(row("memory_limit", "MiB", limit.limit_mib, **more))
    for name in dict.fromkeys(trial.name for trial in trials):
        for of in (*OF_SETTINGS, "seconds"):
            value = middle(trials, name, of)
            scaled = ("step_time", "ms", 1e3 * value) if of == "seconds" else (of, "MiB", value)
            found.append(row(*scaled, setting=told(name)))
    return found
