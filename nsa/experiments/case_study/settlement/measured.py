"""How a trial decides a fact of the settlement; without its trial a fact is open."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nsa.experiments.case_study.settlement.fact import Fact
from nsa.experiments.case_study.settlement.trials import Ended

Found = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """A sentence, asked of what a trial found; show: the numbers behind it."""

    name: str
    trial: str
    sentence: str
    holds: Callable[[Found], bool]
    show: Callable[[Found], str]


def asking(asked: list[Asked]):
    """A decorator for `holds`: @fact(name, trial, sentence, show) adds to `asked`."""

    def fact(name: str, trial: str, sentence: str, show: Callable[[Found], str] = lambda _: ""):
        def kept(holds: Callable[[Found], bool]) -> Callable[[Found], bool]:
            asked.append(Asked(name, trial, sentence, holds, show))
            return holds

        return kept

    return fact


def measured(asked: Iterable[Asked], trials: Mapping[str, Ended]) -> list[Fact]:
    """Every fact, not known where its trial was not run or did not end well."""
    facts = []
    for one in asked:
        ended, evidence = trials.get(one.trial), (f"trial:{one.trial}",)
        if ended is None or ended.found is None:
            why = "not run" if ended is None else f"{ended.outcome}: {ended.message}"
            facts.append(Fact(one.name, one.sentence, None, evidence, why))
        else:
            holds, seen = bool(one.holds(ended.found)), one.show(ended.found)
            facts.append(Fact(one.name, one.sentence, holds, evidence, seen))
    return facts
