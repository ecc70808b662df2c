"""What a trial should take, told beforehand by seconds of smaller work: a calibration.

A calibration is a trial like any other, supervised and kept in the ledger: it runs a few steps of
the same training with fewer layers and tokens, without what only observes it. A TimeModel of those
predicts the large one's steps; the longest time that progress rested, how long it may rest there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from nsa.lab.process import preflight
from nsa.lab.process.runner import Spec
from nsa.lab.process.subject import make as make_subject
from nsa.lab.process.subject import rank_and_ranks
from nsa.lab.search import factors as known
from nsa.lab.search.plan import Plan
from nsa.lab.search.time_model import TimeModel, longest_gap, stall_bound
from nsa.lab.watch import Progress, Unheard, read
from nsa.lab.watch.evidence import Evidence, P

SUBJECT = "nsa.lab.search.calibration:make"
LAYERS, MOST_TOKENS = (1, 2), 512
REPEATS = 5  # of which the first warms up
BUDGET_S = 20.0  # after which no further point is begun
DEADLINE_S = 120.0
EVERY_S = 0.02  # between two looks at P


@dataclass(frozen=True)
class Calibration:
    """Seconds of a step by layers and tokens, of the first one more, and of the longest rest.

    gap_s: the longest time in which P rested in a step of `gap_at` (layers, tokens).
    """

    model: TimeModel
    first_s: float
    gap_s: float
    gap_at: tuple[int, int]

    @classmethod
    def of(cls, evidence: Evidence) -> Calibration | None:
        """Out of a calibration's trial; None where it did not come to its end."""
        rows = (evidence.result or {}).get("points", ())
        if not rows:
            return None
        points = [{**row, "seconds": min(row["seconds"][1:])} for row in rows]
        first_s = max(row["seconds"][0] - min(row["seconds"][1:]) for row in rows)
        longest = max(rows, key=lambda row: row["gap_s"])
        at = longest["layers"], longest["tokens"]
        return cls(TimeModel.fit(points), max(0.0, first_s), longest["gap_s"], at)

    def predicted_s(self, size: tuple[int, int], steps: int) -> float:
        """Seconds of so many steps of `size` layers and tokens, and what the first costs more."""
        return self.first_s + steps * self.model.predict(*size)

    def stall_s(self, size: tuple[int, int]) -> float:
        """How long P may rest at that size: longer as a step of as many layers takes longer."""
        layers = self.gap_at[0]
        slower = self.model.predict(layers, size[1]) / self.model.predict(*self.gap_at)
        return stall_bound(self.gap_s * max(1.0, slower))


def size_of(plan: Plan, cell: Mapping[str, Any]) -> tuple[int, int]:
    """(layers, tokens) of a cell; 1 for what its subject does not have as a whole number."""
    settings = plan.spec(cell).settings
    layers, tokens = (_count(settings.get(name)) for name in ("layers", "tokens"))
    if layers is None and "preset" in settings and plan.subject == known.TRAINING_SUBJECT:
        from nsa.model.presets import preset

        layers = preset(settings["preset"]).layers
    return layers or 1, tokens or 1


def calibration_spec(plan: Plan, cell: Mapping[str, Any]) -> Spec:
    """The trial that calibrates a cell; cells that differ in size or observers alone share it.

    A subject without whole numbers `layers` and `tokens` in its settings is calibrated by its first
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
    sizes: dict[str, list[int]] = {}
    if _count(settings.get("layers")) or layers > 1:
        sizes["layers"] = [n for n in LAYERS if n <= layers]
    if _count(settings.get("tokens")):
        sizes["tokens"] = _lengths(tokens)
    settings = {name: value for name, value in settings.items() if name not in sizes}
    if settings.get("checkpoint"):
        settings["checkpoint"] = "all"  # a range of layers may lie beyond those that are left
    sizes = dict(sorted(sizes.items(), reverse=True))  # all layers of a length, then the next one
    points = [dict(zip(sizes, values, strict=True)) for values in product(*sizes.values())]
    given = {"subject": spec.subject, "settings": settings, "points": points}
    given["source"] = preflight.source_hash(spec.subject)
    if "device" in settings:
        given["device"] = settings["device"]
    return replace(spec, subject=SUBJECT, settings=given, steps=REPEATS * len(points), oracles=())


def _count(value: Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if whole else None


def _lengths(tokens: int) -> list[int]:
    """Three lengths below it, each twice the one before, at most MOST_TOKENS.

    Not the shortest that there are: there a window, or the selected blocks, still grow with T.
    """
    largest = min(MOST_TOKENS, 2 ** ((tokens - 1).bit_length() - 1)) if tokens > 1 else 1
    return sorted({max(1, largest // 4), max(1, largest // 2), largest})


def make(settings: dict[str, Any], progress: Progress) -> Points:
    """The subject of a calibration: see `calibration_spec`."""
    return Points(settings["subject"], settings["settings"], settings["points"], progress)


class Points:
    """REPEATS steps at each point, smallest first; `result` has their seconds and longest rests.

    A single process begins no point that would end after BUDGET_S, as the last one foretells; its
    steps do nothing then. Of several ranks none may leave the others alone, and what was made first
    stays open, for it holds their process group.
    """

    def __init__(
        self,
        subject: str,
        settings: dict[str, Any],
        points: list[dict[str, int]],
        progress: Progress,
    ) -> None:
        self._subject, self._settings = subject, settings
        self._points, self._progress = points, progress
        self._alone = rank_and_ranks()[1] == 1
        self._began, self._spent = time.perf_counter(), False
        self._made: list[Any] = []
        self.rows: list[dict[str, Any]] = []

    def step(self, i: int) -> Any:
        index, again = divmod(i, REPEATS)
        if again == 0 and not self._spent:
            self._spent = self._alone and index > 0 and self._too_late()
            if not self._spent:
                self._open(self._points[index])
        if self._spent:
            return None
        row = self.rows[-1]
        with _Rests(self._progress) as rests:
            began = time.perf_counter()
            loss = self._made[-1].step(again)
            if getattr(loss, "is_cuda", False):
                from nsa.lab.measure.timing import wait  # torch, which plans are read without

                wait(loss.device)
            row["seconds"].append(time.perf_counter() - began)
        if again:  # the first step loads and compiles
            row["gap_s"] = max(row["gap_s"], rests.longest_s())
        return loss

    def result(self) -> dict[str, Any]:
        """{"points": one {"layers", "tokens", "seconds": of each step, "gap_s"} a point}."""
        return {"points": self.rows}

    def close(self) -> None:
        """Closes what was made, the first last."""
        while self._made:
            made = self._made.pop()
            if hasattr(made, "close"):
                made.close()

    def _too_late(self) -> bool:
        """Whether a point that takes four times as long as the last would not be done in time."""
        last_s = sum(self.rows[-1]["seconds"])
        return time.perf_counter() - self._began + 4 * last_s > BUDGET_S

    def _open(self, point: dict[str, int]) -> None:
        if self._alone:
            self.close()
        settings = {**self._settings, **point}
        self._made.append(make_subject(self._subject, settings, Unheard(self._progress)))
        sizes = {"layers": 1, "tokens": 1} | point
        self.rows.append({**sizes, "seconds": [], "gap_s": 0.0})


class _Rests:
    """Looks at P from a thread of its own, while it is open; to open and to close it is a move."""

    def __init__(self, progress: Progress) -> None:
        self._file = progress.file
        self._ticks: list[tuple[float, P | str]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Rests:
        self._ticks.append((time.perf_counter(), "opened"))
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._ticks.append((time.perf_counter(), "closed"))

    def longest_s(self) -> float:
        return longest_gap(self._ticks)

    def _look(self) -> None:
        while not self._over.wait(EVERY_S):
            self._ticks.append((time.perf_counter(), read(self._file)[0]))
