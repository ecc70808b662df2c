"""What must hold of a training that ends well: each oracle watches a trial and says ok or not.

A rank's side: `with watch(names, subject.model) as seen:`, around each step `seen.begin(i)` and
`seen.end(i, loss)`, then `seen.results(remake)`. The supervisor's side: `merge` of all ranks'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = dict[str, Any]  # "ok": bool or None (could not tell), "detail", "what", "place"


def names() -> list[str]:
    """Those that a spec may name."""
    raise NotImplementedError


def check(asked: Sequence[str]) -> None:
    """ValueError for an oracle that is not known, naming the nearest."""
    raise NotImplementedError


class Watch:
    """The oracles of one rank, while it trains."""

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        """Takes every hook away."""

    def begin(self, step: int) -> None:
        """Before a step."""

    def end(self, step: int, loss: Any) -> None:
        """After it, with what it returned."""

    def results(self, remake: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Result]:
        """What each oracle says, JSON-able. `remake(changes)` makes the subject anew, for oracles
        that compare it with another; without it those say that they could not tell."""
        raise NotImplementedError


def watch(asked: Sequence[str], model: Any = None, *, device: Any = None) -> Watch:
    """Watches with the oracles named; model: a torch.nn.Module, or None where there is none."""
    check(asked)
    return Watch()


def merge(by_rank: Mapping[int, Mapping[str, Result]]) -> dict[str, Result]:
    """All ranks' results as one: broken where one is, with the rank; and the ranks compared."""
    raise NotImplementedError
