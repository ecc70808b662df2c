"""Claims of the backend comparison, each decided by rows and never by hand."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas

from nsa.attention import registry
from nsa.config import NSAConfig
from workbook.lab.measure.shapes import Shape
from workbook.rooms.case_study import figures as case_study
from workbook.rooms.comparison import table
from workbook.rooms.comparison.cell import BEYOND, NOT_COMPARED
from workbook.rooms.comparison.implementations import DENSE, LIMITS, NSA
from workbook.rooms.comparison.trials import CRASHED
from workbook.runs import metrics
from workbook.runs.claim import Claim, aim_of, different_programs, verdict_of
from workbook.runs.scaling import fit_exponent

SPREAD = 1.05  # memory that differs by less than this counts as identical
EXPONENT = 1.05
GIB = 1024.0  # MiB
NO_GPU = "times and sizes without a GPU say nothing about one"
NOT_OF_THIS_RUN = "this run was not to measure it"
NO_VALUE = "it was to be measured and has no value"
MEMORY_64K_GIB = {"forward": 2.0, "backward": 4.0}  # beyond inputs and outputs, at T 65536


@dataclass(frozen=True)
class Aim:
    """Upper bounds in ms at one shape and kind of queries, and the best public kernel's times.

    Medians on one H200, bf16, causal, one sequence, l 32, d 16, l' 64, n 16, w 512, mean phi;
    scoring, window and gates included. Public figures are for random inputs and the public
    implementation that is fastest at the shape.
    """

    tokens: int
    queries: str
    forward_ms: float
    backward_ms: float
    public_ms: tuple[float, float] | None
    heads: int = 64
    kv_heads: int = 4
    dim: int = 128

    def fits(self, tokens: int, config: Mapping[str, Any]) -> bool:
        """Return True if a measurement at `tokens` with a row's config has this aim's shape."""
        mine = {"heads": self.heads, "kv_heads": self.kv_heads, "queries": self.queries}
        mine |= {"dim": self.dim, "value_dim": self.dim, "dtype": "bf16", "batch": 1}
        mine |= vars(NSAConfig())
        return tokens == self.tokens and all(config.get(n) == v for n, v in mine.items())

    def __str__(self) -> str:
        sizes = f"HQ {self.heads}, HKV {self.kv_heads}, D {self.dim}"
        return f"{self.tokens // 1024}k, {sizes}, {self.queries}"


AIMS = tuple(
    Aim(tokens, queries, *ms, public if queries == "random" else None, **sizes)
    for tokens, random, correlated, public, sizes in (
        (8192, (2.2, 4.8), (1.7, 4.1), (2.65, 5.93), {}),
        (32768, (12, 26), (9.0, 20), (13.9, 31.5), {}),
        (65536, (29, 60), (22, 54), (36.8, 82.5), {}),
        (131072, (84, 165), (72, 152), (110, 248), {}),
        (32768, (18, 34), (16, 32), (38.3, 54.4), {"kv_heads": 16}),
        (2048, (0.15, 0.35), (0.15, 0.35), (0.70, 0.86), {"heads": 12, "dim": 64}),
        (2048, (0.15, 0.35), (0.15, 0.35), (0.70, 0.86), {"heads": 12}),
    )
    for queries, ms in (("random", random), ("correlated", correlated))
)


def all_claims(df: pandas.DataFrame, cells: Sequence[dict]) -> list[Claim]:
    """Claims that must hold in any run. `cells`: from workbook.rooms.comparison.trials.compare."""
    return [
        everything_is_accurate(cells),
        nothing_broke(cells),
        backends_are_different_programs(cells),
        memory_is_not_identical(df),
        nothing_beats_the_limit(df),
    ]


def aims(df: pandas.DataFrame, backend: str = "triton") -> list[Claim]:
    """Performance aims of a backend on an H200, beside the best public kernel."""
    return [
        *(reaches(df, aim, backend) for aim in AIMS),
        memory_is_linear(df, backend),
        memory_stays_small(df, backend),
        beats_dense_from(df, 8192, backend),
    ]


def everything_is_accurate(cells: Sequence[dict]) -> Claim:
    """Claim that errors are at most twice plain torch's, checked before any time is taken."""
    red = _messages(c for c in cells if c["outcome"] == "red")
    checked = sorted({c["name"] for c in cells if c["errors"]})
    sentence = f"all {len(checked)} implementations that were compared keep the accuracy rule"
    if red:
        return Claim(f"{sentence}; wrong: {', '.join(red)}", "FAIL", red)
    return Claim(sentence, "PASS" if checked else "INCONCLUSIVE", {"checked": checked})


def nothing_broke(cells: Sequence[dict]) -> Claim:
    """Claim that our backends run or decline with a reason; out of memory is a valid outcome."""
    mine = [c for c in cells if c["name"] in registry.names()]
    broken = _messages(c for c in mine if c["outcome"] == "error" or CRASHED in c["message"])
    known = sorted({c["name"] for c in mine})
    sentence = f"each of {len(known)} backends ran or said why it does not"
    if broken:
        return Claim(f"{sentence}; broke off: {', '.join(broken)}", "FAIL", broken)
    if not known:
        return Claim(f"{sentence}: there is none", "INCONCLUSIVE", {})
    silent = _messages(c for c in mine if c["outcome"] == "not run")
    return Claim(sentence, "PASS", {"backends": known}).over(silent)


def backends_are_different_programs(cells: Sequence[dict]) -> Claim:
    """Claim that backends are different programs, by their path witnesses."""
    served = table.paths(cells)
    planned = {c["name"]: c["outcome"] for c in cells if c["name"] in registry.names()}
    programs = {n: tuple(p.items()) for n, p in served.items()}
    return different_programs(programs, served, "backends", planned)


def memory_is_not_identical(df: pandas.DataFrame) -> Claim:
    """Claim that memory differs by backend; the reports' A/B tests ran one program for several."""
    names = list(case_study.IDENTICAL_MIB)
    reported = f"{case_study.IDENTICAL_MIB[names[0]]:,.1f} MB"
    sentence = f'"all backends use identical memory ({reported})" is refuted'
    found, apart = {}, {}
    lines = table.wide(df, "peak_memory", "backward")
    for key, group in lines.groupby(level=table.CURVE, sort=False):
        mine = group.droplevel(table.CURVE).reindex(names)
        for at in mine.columns[mine.notna().sum() > 1]:
            mib, point = mine[at].dropna(), f"{', '.join(key)} queries, T {at}"
            found[point] = mib.round(2).to_dict()
            apart[point] = float(mib.max() / max(mib.min(), 1e-9))
    if not found:
        none = f"no two of {', '.join(names)} ran"
        if len(df) and len({*df["backend"]} & {*names}) < 2:
            return Claim.not_here(sentence, none)
        return Claim(f"{sentence}: {none}", "INCONCLUSIVE", {})
    at = max(apart, key=lambda point: apart[point])  # one difference refutes it
    sentence += f": {', '.join(found[at])} differ by a factor of {apart[at]:.1f} ({at})"
    return Claim(sentence, verdict_of(apart[at] > SPREAD), found)


def nothing_beats_the_limit(df: pandas.DataFrame) -> Claim:
    """Claim that nothing beats the limit; a faster one would not do the counted work."""
    sentence = "no implementation is faster than the physical limit"
    if len(df) and not metrics.on_gpu(df):
        return Claim.not_here(sentence, NO_GPU)
    point = [*table.CURVE, "x_value", "backend", "mode"]
    timed = table.rows_of(df, "latency").dropna(subset="median")
    timed = timed[~timed["backend"].isin(LIMITS.values()) & (timed["checked"] != NOT_COMPARED)]
    both = table.rows_of(df, "fraction_of_limit").merge(timed[point], how="outer", on=point)
    rows = both.dropna(subset="median")
    if not len(rows):
        return Claim(f"{sentence}: nothing was timed", "INCONCLUSIVE", {})
    best = rows.loc[rows["median"].idxmax()]
    name, share = best["backend"], float(best["median"])
    sentence += f": the nearest of {len(rows)} timings is {name}, {best['mode']} at T "
    sentence += f"{best['x_value']}, with {share:.0%} of it"
    evidence = {"backend": name, "fraction": round(share, 3)}
    claim = Claim(sentence, verdict_of(share <= BEYOND), evidence)
    return claim.over(metrics.unmeasured(both, point))


def reaches(df: pandas.DataFrame, aim: Aim, backend: str) -> Claim:
    """Claim that forward and backward reach the aim, with the best public kernel's figures.

    At a T so short that host launches dominate, the times in a CUDA graph count.
    """
    what = f"{backend} at {aim}"
    wanted = f"aim {aim.forward_ms:g} / {aim.backward_ms:g} ms"
    if aim.public_ms:
        wanted += ", best public {:g} / {:g}".format(*aim.public_ms)
    gpu = df["device"].iloc[0] if metrics.on_gpu(df) else ""
    if "H200" not in gpu:
        why = f"the aims are for an H200, this is {gpu}" if gpu else NO_GPU
        return Claim.not_here(f"{what}: {wanted}", why)
    rows = table.rows_of(df, "latency")
    rows = rows[rows["backend"] == backend]
    rows = rows.loc[list(map(aim.fits, rows["x_value"], metrics.configs(rows)))]
    if not len(rows):
        return Claim.not_here(f"{what}: {wanted}", NOT_OF_THIS_RUN)
    by_mode = rows.dropna(subset="median").set_index("mode")["median"]
    graphs = {"graph_forward", "graph_backward"} & {*rows["mode"]}
    if not {"forward", "backward"} <= set(by_mode.index) or rows["median"].isna().any():
        return Claim.undecided(f"{what}: {wanted}", NO_VALUE)
    if len(graphs) == 1:
        return Claim.undecided(f"{what}: {wanted}", f"there is {graphs.pop()} alone")
    got, how = by_mode[["forward", "backward"]].tolist(), ""
    if graphs:
        how = " in a CUDA graph, {:.3g} / {:.3g} without".format(*got)
        got = by_mode[["graph_forward", "graph_backward"]].tolist()
    what += f": {got[0]:.3g} / {got[1]:.3g} ms{how} ({wanted})"
    met = got[0] <= aim.forward_ms and got[1] <= aim.backward_ms
    return Claim(what, aim_of(met), {m: round(float(ms), 4) for m, ms in by_mode.items()})


def memory_is_linear(df: pandas.DataFrame, backend: str) -> Claim:
    """Claim that memory beyond inputs and outputs is linear at T >= 2048, in both directions."""
    found = {}
    for mode, key, line in _memory(df, backend):
        line = line[(line.index >= 2048) & (line > 0)]
        if len(line) > 2:
            fit = fit_exponent(list(line.index), line.to_numpy())
            found[f"{mode}, {', '.join(key)}"] = round(fit.exponent, 3)
    sentence = f"{backend}'s memory grows at most as T^{EXPONENT}"
    if not metrics.on_gpu(df):
        return Claim.not_here(sentence, NO_GPU)
    if not found:
        mine = _planned(df, backend)
        few = "fewer than three T from 2048 on"
        lost = mine[mine >= 2048].nunique() > 2
        return Claim.undecided(sentence, few) if lost else Claim.not_here(sentence, few)
    worst = max(found.values())
    claim = Claim(f"{sentence}: T^{worst:.2f}", aim_of(worst <= EXPONENT), found)
    curves = table.rows_of(df, "peak_memory")
    curves = curves[curves["x_value"] >= 2048]
    many = curves.groupby(table.CURVE)["x_value"].transform("nunique") > 2
    return claim.over(_lost(curves[many], [backend]))


def memory_stays_small(df: pandas.DataFrame, backend: str) -> Claim:
    """Claim that memory at T 64k of the main shape stays below MEMORY_64K_GIB."""
    limits, main = MEMORY_64K_GIB, table.shape_name(asdict(Shape(65536)))
    sentence = f"{backend} at 64k takes less than {limits['forward']:g} GiB beyond inputs and "
    sentence += f"outputs forward and {limits['backward']:g} backward"
    found: dict[str, float] = {}
    for mode, key, line in _memory(df, backend):
        if 65536 in line.index and key[0] == main:
            found[mode] = max(found.get(mode, 0.0), float(line[65536]) / GIB)
    if set(found) != set(limits):
        if 65536 in set(_planned(df, backend, main)):
            return Claim.undecided(sentence, NO_VALUE)
        return Claim.not_here(sentence, NOT_OF_THIS_RUN)
    sentence += f": {found['forward']:.2f} and {found['backward']:.2f} GiB"
    evidence = {mode: round(gib, 3) for mode, gib in found.items()}
    claim = Claim(sentence, aim_of(all(found[m] < limits[m] for m in limits)), evidence)
    rows = table.rows_of(df, "peak_memory")
    rows = rows[(rows["x_value"] == 65536) & (rows["shape"] == main)]
    return claim.over(_lost(rows, [backend]))


def beats_dense_from(df: pandas.DataFrame, tokens: int, backend: str) -> Claim:
    """Claim that a backend beats the fastest dense attention of its process, in both directions."""
    sentence = f"{backend} is faster than every dense attention from T {tokens} on"
    if not metrics.on_gpu(df):
        return Claim.not_here(sentence, NO_GPU)
    rows = table.rows_of(df, "latency", "forward", "backward")
    rows = rows[(rows["x_value"] >= tokens) & ~rows["backend"].isin(LIMITS.values())]
    if not {DENSE, NSA} <= {*rows["operation"]} or backend not in {*rows["backend"]}:
        return Claim.not_here(sentence, NOT_OF_THIS_RUN)
    there, keys = rows.dropna(subset="median"), [*table.CURVE, "x_value", "mode"]
    dense = there[there["operation"] == DENSE]
    ours = there[(there["operation"] == NSA) & (there["backend"] == backend)].set_index(keys)
    ratio = (dense.groupby(keys)["median"].min() / ours["median"]).dropna()
    if not len(ratio):
        return Claim.undecided(sentence, NO_VALUE)
    names = sorted(set(dense["backend"]))
    sentence = sentence.replace("dense", f"dense ({', '.join(names)})", 1)
    shape, queries, at, mode = ratio.idxmin()
    text = f"{sentence}: at least {ratio.min():.2f} times ({mode}, {queries}, T {at}, {shape})"
    found = {", ".join(map(str, key)): round(float(r), 2) for key, r in ratio.items()}
    planned = {*rows.loc[rows["operation"] == DENSE, "backend"]}
    claim = Claim(text, aim_of(bool(ratio.min() > 1)), found)
    return claim.over(_lost(rows, [*planned, backend]))


def _messages(cells: Iterable[dict]) -> dict[str, str]:
    """Messages of cells, as {"gather T=8192": reason}."""
    return {f"{c['name']} T={c['shape']['tokens']}": c["message"] for c in cells}


def _lost(rows: pandas.DataFrame, backends: Sequence[str]) -> list[str]:
    """Points of these backends that were not measured, of every shape, T and mode in the rows."""
    cell = [*table.CURVE, "x_value"]
    return metrics.unmeasured(rows, cell, ["mode"], of={"backend": backends})


def _planned(df: pandas.DataFrame, backend: str, shape: str | None = None) -> pandas.Series:
    """All T at which the backend was to be measured, at one shape or at all."""
    rows = table.rows_of(df, "peak_memory")
    mine = rows["backend"] == backend
    return rows.loc[mine if shape is None else mine & (rows["shape"] == shape), "x_value"]


def _memory(df: pandas.DataFrame, backend: str) -> Iterator[tuple[str, tuple, pandas.Series]]:
    """Yield (mode, (shape, queries), MiB by T without failures) of one backend."""
    for mode in ("forward", "backward"):
        for (shape, queries, name), line in table.wide(df, "peak_memory", mode).iterrows():
            if name == backend:
                yield mode, (shape, queries), line.replace([np.inf], np.nan).dropna()
