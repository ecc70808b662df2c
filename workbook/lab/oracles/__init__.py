"""Oracles, which check properties of a training that completes: each watches a trial and judges it.

On a rank: `with Watch(names, subject) as seen:`, around each step `seen.begin(i)` and
`seen.end(i, loss)`, then `seen.results(remake)`. In the supervisor: `merge` the results of all.

A result is {"ok", "detail", "what", "place"}: ok is None if it is undecided; what, the word for the
fault; place, the parameter or module, independent of the model's depth. It may have a "hint", a
sentence on something that may be intended and therefore never counts as a fault.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

from nsa.spelling import nearest
from workbook.lab.oracles import compare, gradients
from workbook.lab.oracles.compare import Remake
from workbook.lab.oracles.duration import Duration
from workbook.lab.oracles.growth import Census, Graph, Memory, Recompilations
from workbook.lab.oracles.learning import Learning
from workbook.lab.oracles.losses import Losses
from workbook.lab.oracles.steps import Result, Steps, unknown

# Name, argument after a colon, and property that must hold.
ORACLES = {
    "arrival": (
        "",
        "each trainable parameter has a gradient, from some step on and not only zeros",
    ),
    "finite": ("", "gradients and parameters are finite"),
    "ranks": ("", "the same gradients arrive on all ranks"),
    "graph": ("", "a backward does not go through more nodes from step to step"),
    "census": ("", "no tensors, graphs or cycles are kept from step to step"),
    "memory": ("", "memory does not grow steadily from step to step"),
    "recompilations": ("", "steps do not compile again and again"),
    "duration": ("", "a step does not take ever more processor time (hints: a little more)"),
    "optimizers": ("", "what has a gradient is in an optimizer (hints: it does not change)"),
    "rows": ("", "(hints) no part of a gradient is always zero"),
    "explosion": ("MOST", "no loss is above MOST; (hints) without it, the loss does not explode"),
    "plateau": ("MOST", "the loss ends at MOST or below; (hints) without it, the loss falls"),
    "checkpoint": ("", "checkpointing on and off have the same gradients"),
    "backends": ("VALUE or SETTING=VALUE", "another backend, or setting, has the same gradients"),
    "quadratic": ("SETTING", "what is kept does not grow with the square of settings['tokens']"),
}
ANEW = ("checkpoint", "backends", "quadratic")  # create the subject again, after the last step
CHEAP = tuple(name for name in ORACLES if name not in ANEW)
GRADIENTS = ("arrival", "finite", "ranks")
LEARNING = ("optimizers", "rows")
LOSSES = ("explosion", "plateau")
NO_MODEL = "the subject has no `model`, a torch.nn.Module, to look at"


def check(asked: Sequence[str]) -> None:
    """Raise ValueError for an unknown oracle, naming the nearest, or for a bad or missing value."""
    for one in asked:
        name, colon, value = one.partition(":")
        if name not in ORACLES:
            raise ValueError(f"no oracle {name!r}; {nearest(name, ORACLES)}")
        if name == "backends" and not value:
            raise ValueError("oracle 'backends' compares with another: 'backends:sequential'")
        if name in LOSSES and colon:
            try:
                float(value)
            except ValueError:
                raise ValueError(f"oracle {one!r} wants a number, as '{name}:2.5'") from None
        if colon and not ORACLES[name][0]:
            raise ValueError(f"oracle {name!r} takes nothing after a colon, got {value!r}")


class Watch(Steps):
    """Oracles of one rank, while it trains a subject, or a torch.nn.Module; see ORACLES.

    subject.model is observed; parameters named in subject.without_gradient are expected to have no
    gradient. settings: those with which the subject was created.
    """

    def __init__(
        self, asked: Sequence[str], subject: Any, settings: Mapping[str, Any] | None = None
    ) -> None:
        check(asked)
        self._asked = {one.partition(":")[0]: one.partition(":")[2] for one in asked}
        self._settings = dict(settings or {})
        model = subject if isinstance(subject, nn.Module) else getattr(subject, "model", None)
        model = model if isinstance(model, nn.Module) else None
        self._has_model = model is not None
        # Memory after the others, which free their data of a step first.
        made = {
            "graph": Graph,
            "census": Census,
            "memory": lambda: Memory(model),
            "recompilations": Recompilations,
        }
        self._watching = {name: make() for name, make in made.items() if name in self._asked}
        self._gradients = self._learning = None
        self._losses = Losses()
        listeners = list(self._watching.values())
        if not self._asked.keys().isdisjoint(LOSSES):
            listeners.insert(0, self._losses)
        expected = getattr(subject, "without_gradient", ())
        if model is not None and not self._asked.keys().isdisjoint(LEARNING):
            self._learning = Learning(model, subject, expected)
            listeners.insert(0, self._learning)
        if model is not None and not self._asked.keys().isdisjoint(GRADIENTS):
            self._gradients = gradients.Gradients(model, expected)
            if not self._gradients.why_not:
                listeners.insert(0, self._gradients)
        if "duration" in self._asked:  # begins last and ends first, to exclude other oracles' work
            timed = self._watching["duration"] = Duration(model)
            listeners.insert(0, SimpleNamespace(end=timed.end))
            listeners.append(SimpleNamespace(begin=timed.begin, close=timed.close))
        super().__init__(listeners)

    def results(self, remake: Remake | None = None) -> dict[str, Result]:
        """Results of the oracles by name, JSON-serializable.

        `remake(changes)` creates the subject again with some settings changed, for the oracles in
        ANEW; without it, these are undecided. Call it after the last step, inside the `with` or
        after it. An oracle that raises an exception is undecided.
        """
        if self._gradients is not None:
            self._gradients.read()
        found = {}
        for name, value in self._asked.items():
            try:
                found[name] = self._result(name, value, remake)
            except Exception as error:
                found[name] = unknown(f"broke off: {type(error).__name__}: {error}")
        return found

    def _result(self, name: str, value: str, remake: Remake | None) -> Result:
        if not self._has_model and name in (*GRADIENTS, *LEARNING):
            return unknown(NO_MODEL)
        if name in GRADIENTS:
            return getattr(gradients, name)(self._gradients)
        if name in LEARNING:
            return getattr(self._learning, name)()
        if name in LOSSES:
            return getattr(self._losses, name)(value)
        if name in self._watching:
            return self._watching[name].result()
        if remake is None:
            return unknown("the subject cannot be rebuilt here")
        if name == "checkpoint":
            return compare.checkpointing(remake)
        settings = self._settings or dict(getattr(remake({}), "settings", {}))
        if name == "quadratic":
            return compare.quadratic(remake, settings, value or "tokens")
        key, equals, other = value.partition("=")
        key, other = (key, _value(other)) if equals else ("backend", value)
        return compare.same_gradients(remake, settings, key, other)


def merge(by_rank: Mapping[int, Mapping[str, Result]]) -> dict[str, Result]:
    """Merge all ranks' results: broken if one is, with its rank; gradients are compared.

    A result that is the same on every rank is given without a rank.
    """
    merged: dict[str, Result] = {}
    for name in dict.fromkeys(name for results in by_rank.values() for name in results):
        mine = {rank: results[name] for rank, results in by_rank.items() if name in results}
        if name == "ranks":
            merged[name] = gradients.compare_ranks(mine)
            continue
        worst = min(mine, key=lambda rank: (*_rank_of(mine[rank]), rank))
        first = dict(mine[worst])
        first.pop("at", None)
        if len({str(result["detail"]) for result in mine.values()}) > 1:
            first["detail"] = f"rank {worst}: {first['detail']}"
        merged[name] = first
    return merged


def _rank_of(result: Result) -> tuple[int, float, bool]:
    """Sort key: broken before unknown before ok, then the earliest, then results with a hint."""
    order = {False: 0, None: 1}.get(result["ok"], 2)
    return order, result.get("at", 0.0), "hint" not in result


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
