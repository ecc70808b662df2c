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
from workbook.runs import metrics, rules
from workbook.runs.claim import Claim, NotHere, Undecided, aim, aim_of, claim
from workbook.runs.scaling import fit_exponent

SPREAD = 1.05  # memory that differs by less than this counts as identical
EXPONENT = 1.05
GIB = 1024.0  # MiB
NO_GPU = "times and sizes without a GPU say nothing about one"
REPORTED = tuple(case_study.IDENTICAL_MIB)  # backends of the reports' A/B tests
MEMORY_64K_GIB = {"forward": 2.0, "backward": 4.0}  # beyond inputs and outputs, at T 65536


@dataclass(frozen=True)
class Aim:
    """Upper bounds in ms at one shape and kind of queries, and the best public kernel's times.

    Medians on one H200, bf16, causal, one sequence, l 32, d 16, l' 64, n 16, w 512, mean phi;
    scoring, window and gates included. Public figures are for random inputs and the public
    implementation that is fastest at the shape. On captured queries, which select as trained models
    do, an aim lies halfway between those on random and on correlated ones, as measured times do.
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
    for tokens, random, correlated, captured, public, sizes in (
        (8192, (2.2, 4.8), (1.7, 4.1), (2.0, 4.5), (2.65, 5.93), {}),
        (32768, (12, 26), (9.0, 20), (10.5, 23), (13.9, 31.5), {}),
        (65536, (29, 60), (22, 54), (25.5, 57), (36.8, 82.5), {}),
        (131072, (84, 165), (72, 152), None, (110, 248), {}),
        (32768, (18, 34), (16, 32), None, (38.3, 54.4), {"kv_heads": 16}),
        (2048, (0.15, 0.35), (0.15, 0.35), None, (0.70, 0.86), {"heads": 12, "dim": 64}),
        (2048, (0.15, 0.35), (0.15, 0.35), None, (0.70, 0.86), {"heads": 12}),
    )
    for queries, ms in (("random", random), ("correlated", correlated), ("captured", captured))
    if ms
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


@claim(lambda cells: f"all {len({c['name'] for c in cells if c['errors']})} implementations that "
                     "were compared keep the accuracy rule")  # fmt: skip
def everything_is_accurate(cells: Sequence[dict]):
    """Claim that errors are at most twice plain torch's, checked before any time is taken."""
    if red := _messages(c for c in cells if c["outcome"] == "red"):
        return f"; wrong: {', '.join(red)}", False, red
    checked = sorted({c["name"] for c in cells if c["errors"]})
    if not checked:
        raise Undecided("nothing was compared")
    return "", True, {"checked": checked}


def nothing_broke(cells: Sequence[dict]) -> Claim:
    """Claim that our backends run or decline with a reason; out of memory is a valid outcome."""
    mine = [c for c in cells if c["name"] in registry.names()]
    broken = _messages(c for c in mine if c["outcome"] == "error" or CRASHED in c["message"])
    known = sorted({c["name"] for c in mine})
    silent = _messages(c for c in mine if c["outcome"] == "not run")
    sentence = f"each of {len(known)} backends ran or said why it does not"
    return rules.no_cell_broke(sentence, broken, {"backends": known} if known else {}, silent)


def backends_are_different_programs(cells: Sequence[dict]) -> Claim:
    """Claim that backends are different programs, by their path witnesses."""
    served = table.paths(cells)
    planned = {c["name"]: c["outcome"] for c in cells if c["name"] in registry.names()}
    programs = {n: tuple(p.items()) for n, p in served.items()}
    return rules.different_programs(programs, served, "backends", planned)


@claim(f'"all backends use identical memory ({case_study.IDENTICAL_MIB[REPORTED[0]]:,.1f} MB)" is '
       "refuted")  # fmt: skip
def memory_is_not_identical(df: pandas.DataFrame):
    """Claim that memory differs by backend; the reports' A/B tests ran one program for several."""
    found, apart = {}, {}
    lines = table.wide(df, "peak_memory", "backward")
    for key, group in lines.groupby(level=table.CURVE, sort=False):
        mine = group.droplevel(table.CURVE).reindex(REPORTED)
        for at in mine.columns[mine.notna().sum() > 1]:
            mib, point = mine[at].dropna(), f"{', '.join(key)} queries, T {at}"
            found[point] = mib.round(2).to_dict()
            apart[point] = float(mib.max() / max(mib.min(), 1e-9))
    if not found:
        few = len(df) and len({*df["backend"]} & {*REPORTED}) < 2
        raise (NotHere if few else Undecided)(f"no two of {', '.join(REPORTED)} ran")
    at = max(apart, key=lambda point: apart[point])  # one difference refutes it
    said = f"{', '.join(found[at])} differ by a factor of {apart[at]:.1f} ({at})"
    return said, apart[at] > SPREAD, found


@claim("no implementation is faster than the physical limit")
def nothing_beats_the_limit(df: pandas.DataFrame):
    """Claim that nothing beats the limit; a faster one would not do the counted work."""
    if len(df) and not metrics.on_gpu(df):
        raise NotHere(NO_GPU)
    point = [*table.CURVE, "x_value", "backend", "mode"]
    timed = table.rows_of(df, "latency").dropna(subset="median")
    timed = timed[~timed["backend"].isin(LIMITS.values()) & (timed["checked"] != NOT_COMPARED)]
    both = table.rows_of(df, "fraction_of_limit").merge(timed[point], how="outer", on=point)
    rows = both.dropna(subset="median")
    if not len(rows):
        raise Undecided("nothing was timed")
    best = rows.loc[rows["median"].idxmax()]
    name, share = best["backend"], float(best["median"])
    found = f"the nearest of {len(rows)} timings is {name}, {best['mode']} at T "
    found += f"{best['x_value']}, with {share:.0%} of it"
    evidence = {"backend": name, "fraction": round(share, 3)}
    return found, share <= BEYOND, evidence, metrics.unmeasured(both, point)


@aim("{backend} at {aim}")
def reaches(df: pandas.DataFrame, aim: Aim, backend: str):
    """Claim that forward and backward reach the aim, with the best public kernel's figures.

    At a T so short that host launches dominate, the times in a CUDA graph count.
    """
    wanted = f"aim {aim.forward_ms:g} / {aim.backward_ms:g} ms"
    if aim.public_ms:
        wanted += ", best public {:g} / {:g}".format(*aim.public_ms)
    rules.needs_h200(df["device"].iloc[0] if metrics.on_gpu(df) else "", NO_GPU, wanted)
    rows = table.rows_of(df, "latency")
    rows = rows[rows["backend"] == backend]
    rows = rows.loc[list(map(aim.fits, rows["x_value"], metrics.configs(rows)))]
    if not len(rows):
        raise NotHere(rules.NOT_OF_THIS_RUN, found=wanted)
    by_mode = rows.dropna(subset="median").set_index("mode")["median"]
    graphs = {"graph_forward", "graph_backward"} & {*rows["mode"]}
    if not {"forward", "backward"} <= set(by_mode.index) or rows["median"].isna().any():
        raise Undecided(rules.NO_VALUE, found=wanted)
    if len(graphs) == 1:
        raise Undecided(f"there is {graphs.pop()} alone", found=wanted)
    got, how = by_mode[["forward", "backward"]].tolist(), ""
    if graphs:
        how = " in a CUDA graph, {:.3g} / {:.3g} without".format(*got)
        got = by_mode[["graph_forward", "graph_backward"]].tolist()
    found = f"{got[0]:.3g} / {got[1]:.3g} ms{how} ({wanted})"
    met = got[0] <= aim.forward_ms and got[1] <= aim.backward_ms
    return found, met, {m: round(float(ms), 4) for m, ms in by_mode.items()}


@aim(f"{{backend}}'s memory grows at most as T^{EXPONENT}")
def memory_is_linear(df: pandas.DataFrame, backend: str):
    """Claim that memory beyond inputs and outputs is linear at T >= 2048, in both directions."""
    rules.needs_gpu(metrics.on_gpu(df), NO_GPU)
    found = {}
    for mode, key, line in _memory(df, backend):
        line = line[(line.index >= 2048) & (line > 0)]
        if len(line) > 2:
            fit = fit_exponent(list(line.index), line.to_numpy())
            found[f"{mode}, {', '.join(key)}"] = round(fit.exponent, 3)
    if not found:
        mine = _planned(df, backend)
        lost = mine[mine >= 2048].nunique() > 2
        raise (Undecided if lost else NotHere)("fewer than three T from 2048 on")
    worst = max(found.values())
    curves = table.rows_of(df, "peak_memory")
    curves = curves[curves["x_value"] >= 2048]
    many = curves.groupby(table.CURVE)["x_value"].transform("nunique") > 2
    return f"T^{worst:.2f}", worst <= EXPONENT, found, _lost(curves[many], [backend])


@aim("{{backend}} at 64k takes less than {forward:g} GiB beyond inputs and outputs forward and "
     "{backward:g} backward".format(**MEMORY_64K_GIB))  # fmt: skip
def memory_stays_small(df: pandas.DataFrame, backend: str):
    """Claim that memory at T 64k of the main shape stays below MEMORY_64K_GIB."""
    limits, main = MEMORY_64K_GIB, table.shape_name(asdict(Shape(65536)))
    gib: dict[str, float] = {}
    for mode, key, line in _memory(df, backend):
        if 65536 in line.index and key[0] == main:
            gib[mode] = max(gib.get(mode, 0.0), float(line[65536]) / GIB)
    if set(gib) != set(limits):
        if 65536 in set(_planned(df, backend, main)):
            raise Undecided(rules.NO_VALUE)
        raise NotHere(rules.NOT_OF_THIS_RUN)
    found = f"{gib['forward']:.2f} and {gib['backward']:.2f} GiB"
    rows = table.rows_of(df, "peak_memory")
    rows = rows[(rows["x_value"] == 65536) & (rows["shape"] == main)]
    evidence = {mode: round(size, 3) for mode, size in gib.items()}
    return found, all(gib[m] < limits[m] for m in limits), evidence, _lost(rows, [backend])


def beats_dense_from(df: pandas.DataFrame, tokens: int, backend: str) -> Claim:
    """Claim that a backend beats the fastest dense attention of its process, in both directions."""
    sentence = f"{backend} is faster than every dense attention from T {tokens} on"
    if not metrics.on_gpu(df):
        return Claim.not_here(sentence, NO_GPU)
    rows = table.rows_of(df, "latency", "forward", "backward")
    rows = rows[(rows["x_value"] >= tokens) & ~rows["backend"].isin(LIMITS.values())]
    if not {DENSE, NSA} <= {*rows["operation"]} or backend not in {*rows["backend"]}:
        return Claim.not_here(sentence, rules.NOT_OF_THIS_RUN)
    there, keys = rows.dropna(subset="median"), [*table.CURVE, "x_value", "mode"]
    dense = there[there["operation"] == DENSE]
    ours = there[(there["operation"] == NSA) & (there["backend"] == backend)].set_index(keys)
    ratio = (dense.groupby(keys)["median"].min() / ours["median"]).dropna()
    if not len(ratio):
        return Claim.undecided(sentence, rules.NO_VALUE)
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
