"""Calibration: estimates a trial's duration from a few seconds of smaller work.

A calibration is a trial like any other, supervised and kept in the ledger: it runs a few steps of
the same training with fewer layers and tokens, without observers. A TimeModel fitted to them
predicts the steps of the large trial; the longest rest of progress bounds the rest allowed there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import pairwise, product
from statistics import median
from typing import Any

from whyhung.process import preflight
from whyhung.process.runner import Spec
from whyhung.process.subject import make as make_subject
from whyhung.process.subject import rank_and_ranks
from whyhung.watch import Progress, Unheard, read
from whyhung.watch.evidence import Evidence, P
from workbook.lab.search import factors as known
from workbook.lab.search.plan import Plan

SUBJECT = "workbook.lab.search.calibration:make"
LAYERS, MOST_TOKENS = (1, 2), 512
REPEATS = 5  # the first is a warm-up
LEAST_S, MOST_TIMES = 0.1, 16  # per repeat, over several steps if one is short: ms are mostly noise
BUDGET_S = 20.0  # no further point starts after this
DEADLINE_S = 120.0
EVERY_S = 0.02  # between two reads of P
LEAST_STALL_S, GAPS = 5.0, 10.0


@dataclass(frozen=True)
class TimeModel:
    """Seconds of a step, as a + b L + c L T + d L T T for L layers and T tokens: a constant, a
    cost per layer, the projections, and the quadratic part; none of them negative.

    Another machine, backend, precision or set of observers needs its own fit.
    """

    a: float
    b: float
    c: float
    d: float

    @classmethod
    def fit(cls, points: Iterable[Mapping[str, Any]]) -> TimeModel:
        """Fit to points {"layers", "tokens", "seconds"}: least squares without negative terms.

        Errors are relative (weights 1/t), so that small points count as much as large ones.
        Recommended are layers 1 and 2 at three lengths, the minimum of several times each: 1 % of
        noise at T 64 to 256 can become 1.4 x at T 2048, more often too long than too short.
        """
        import numpy as np
        from scipy.optimize import nnls

        rows = [[x / p["seconds"] for x in _terms(p["layers"], p["tokens"])] for p in points]
        scale = np.max(rows, axis=0)  # L T T is millions of times the constant
        found, _ = nnls(rows / scale, np.ones(len(rows)))
        return cls(*(found / scale).tolist())

    def predict(self, layers: int, tokens: int) -> float:
        """Seconds of a step with these numbers of layers and tokens."""
        return sum(a * x for a, x in zip(astuple(self), _terms(layers, tokens), strict=True))


def _terms(layers: int, tokens: int) -> tuple[float, float, float, float]:
    return 1.0, float(layers), float(layers * tokens), float(layers * tokens * tokens)


@dataclass(frozen=True)
class Calibration:
    """Step time by layers and tokens, extra seconds of the first step, and the longest rest.

    gap_s: the longest time for which P rested in a step of `gap_at` (layers, tokens).
    """

    model: TimeModel
    first_s: float
    gap_s: float
    gap_at: tuple[int, int]

    @classmethod
    def of(cls, evidence: Evidence) -> Calibration | None:
        """Create from a calibration's trial; None if it did not finish."""
        rows = (evidence.result or {}).get("points", ())
        if not rows:
            return None
        # The median: typical of many steps on a machine under this load.
        points = [{**row, "seconds": median(row["seconds"][1:])} for row in rows]
        first_s = max(row["seconds"][0] - p["seconds"] for row, p in zip(rows, points, strict=True))
        longest = max(rows, key=lambda row: row["gap_s"])
        at = longest["layers"], longest["tokens"]
        return cls(TimeModel.fit(points), max(0.0, first_s), longest["gap_s"], at)

    def predicted_s(self, size: tuple[int, int], steps: int) -> float:
        """Seconds of `steps` steps at `size` (layers, tokens), with the first step's extra cost."""
        return self.first_s + steps * self.model.predict(*size)

    def stall_s(self, size: tuple[int, int]) -> float:
        """Seconds that P may rest at that size: GAPS times the longest rest, scaled by the time of
        a step at equal layers, and at least LEAST_STALL_S."""
        layers = self.gap_at[0]
        slower = self.model.predict(layers, size[1]) / self.model.predict(*self.gap_at)
        return max(LEAST_STALL_S, GAPS * (self.gap_s * max(1.0, slower)))


def longest_gap(ticks: Iterable[tuple[float, Any]]) -> float:
    """Return the longest rest of a progress coordinate, from (seconds, coordinate) pairs.

    Time before the first move is not counted, since nothing had begun. 0.0 if nothing moved.
    """
    moves = [t for (_, before), (t, p) in pairwise(ticks) if p != before]
    return max((b - a for a, b in pairwise(moves)), default=0.0)


def size_of(plan: Plan, cell: Mapping[str, Any]) -> tuple[int, int]:
    """(layers, tokens) of a cell; 1 for each that its subject lacks as a whole number."""
    settings = plan.spec(cell).settings
    layers, tokens = (_count(settings.get(name)) for name in ("layers", "tokens"))
    if not layers and "preset" in settings and plan.subject == known.TRAINING_SUBJECT:
        from nsa.model.presets import preset

        layers = preset(settings["preset"]).layers
    return layers or 1, tokens or 1


def calibration_spec(plan: Plan, cell: Mapping[str, Any]) -> Spec:
    """Trial that calibrates a cell; cells that differ only in size or observers share it.

    A subject without integers `layers` and `tokens` in its settings is calibrated by its first
    steps.
    """
    plain = dict(cell)
    for name in plan.settings | plan.factors:
        factor = known.find(plan.subject, name)
        if factor is not None and factor.slows > 1:
            plain[name] = factor.default
    spec = replace(plan, factors={}, settings=plan.settings | plain, never=[], seen={}).spec({})
    settings = dict(spec.settings)
    layers, tokens = size_of(plan, cell)
    sizes: dict[str, list[int]] = {}  # all layers of a length, then the next one
    if _count(settings.get("tokens")):
        sizes["tokens"] = _lengths(tokens)
    if _count(settings.get("layers")) or layers > 1:
        sizes["layers"] = [n for n in LAYERS if n <= layers]
    settings = {name: value for name, value in settings.items() if name not in sizes}
    if settings.get("checkpoint"):
        settings["checkpoint"] = "all"  # a range of layers may exceed the smaller model
    points = [dict(zip(sizes, values, strict=True)) for values in product(*sizes.values())]
    given = {"subject": spec.subject, "settings": settings, "points": points}
    given["source"] = preflight.source_hash(spec.subject)
    if "device" in settings:
        given["device"] = settings["device"]
    return replace(spec, subject=SUBJECT, settings=given, steps=REPEATS * len(points), oracles=())


def _count(value: Any) -> int:
    """Return a whole number above 0 unchanged; 0 for anything else."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if whole else 0


def _lengths(tokens: int) -> list[int]:
    """Three powers of two up to `tokens`, each twice the one before, at most MOST_TOKENS.

    Not the shortest lengths: there a window, or the selected blocks, still grow with T.
    """
    largest = min(MOST_TOKENS, 2 ** (tokens.bit_length() - 1)) if tokens else 1
    found = {max(1, largest // 4), max(1, largest // 2), largest}
    # One more for a far larger length, if BUDGET_S allows: the quadratic part shows late.
    return sorted(found | ({2 * MOST_TOKENS} if tokens >= 4 * MOST_TOKENS else set()))


class Points:
    """Subject of `calibration_spec`: REPEATS steps at each point, smallest first.

    A single process starts no point estimated (from the last one) to end after BUDGET_S; further
    steps do nothing. With several ranks all must run the same steps, and the first subject stays
    open, since it holds their process group. `close` closes open subjects, the first one last.
    """

    def __init__(self, settings: dict[str, Any], progress: Progress) -> None:
        self._given, self._progress = settings, progress
        self._alone = rank_and_ranks()[1] == 1
        self._began, self._spent = time.perf_counter(), False
        self._made: Any = None
        self._opened = ExitStack()
        self.close = self._opened.close
        self.rows: list[dict[str, Any]] = []

    def step(self, i: int) -> Any:
        index, again = divmod(i, REPEATS)
        if again == 0 and index and self._alone:
            # The next point may take four times as long as the last.
            expected_s = 4 * sum(self.rows[-1]["seconds"])
            self._spent |= time.perf_counter() - self._began + expected_s > BUDGET_S
        if self._spent:
            return None
        if again == 0:
            self._open(self._given["points"][index])
        row = self.rows[-1]
        with _looked_at(self._progress) as ticks:
            began, times = time.perf_counter(), 0
            while True:
                loss = self._made.step(again)
                if getattr(loss, "is_cuda", False):
                    from workbook.lab.measure.timing import wait  # needs torch; plans do not

                    wait(loss.device)
                took_s, times = time.perf_counter() - began, times + 1
                # All ranks must take the same number of steps.
                if not (again and self._alone) or took_s >= LEAST_S or times == MOST_TIMES:
                    break
            row["seconds"].append(took_s / times)
        if again:  # the first step loads and compiles
            row["gap_s"] = max(row["gap_s"], longest_gap(ticks))
        return loss

    def result(self) -> dict[str, Any]:
        """{"points": one {"layers", "tokens", "seconds": of each step, "gap_s"} per point}."""
        return {"points": self.rows}

    def _open(self, point: dict[str, int]) -> None:
        if self._alone:
            self._opened.close()
        settings = self._given["settings"] | point
        self._made = make_subject(self._given["subject"], settings, Unheard(self._progress))
        if hasattr(self._made, "close"):
            self._opened.enter_context(closing(self._made))
        self.rows.append({"layers": 1, "tokens": 1} | point | {"seconds": [], "gap_s": 0.0})


make = Points


@contextmanager
def _looked_at(progress: Progress) -> Iterator[list[tuple[float, P | str]]]:
    """Yield (seconds, P) sampled by a separate thread; its start and end count as changes of P."""
    ticks: list[tuple[float, P | str]] = [(time.perf_counter(), "opened")]
    over = threading.Event()

    def look() -> None:
        while not over.wait(EVERY_S):
            ticks.append((time.perf_counter(), read(progress.file)[0]))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield ticks
    finally:
        over.set()
        thread.join()
        ticks.append((time.perf_counter(), "closed"))
