"""Rules that several rooms share, and the machines that they need."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from workbook.runs.claim import ANSWERS, Claim, NotHere, Undecided, claim, verdict_of

NO_GPU = "times without a GPU say nothing about one"
NOT_OF_THIS_RUN = "this run was not to measure it"
NO_VALUE = "it was to be measured and has no value"


def needs_gpu(gpu: object, why: str = NO_GPU) -> None:
    """Raise NotHere unless the rows are of a GPU; gpu: its name, or True; falsy on a CPU."""
    if not gpu:
        raise NotHere(why)


def needs_h200(gpu: str, why: str = NO_GPU, found: str = "") -> None:
    """Raise NotHere, with what is already `found`, unless the rows are of an H200."""
    if "H200" not in gpu:
        raise NotHere(f"the aims are for an H200, this is {gpu}" if gpu else why, found=found)


@claim("{sentence}")
def no_cell_broke(sentence: str, broken: Mapping[str, str], ended: Any, lost: Iterable[object]):
    """Claim that no cell broke off; out of memory, declined and not run are valid outcomes.
    broken: messages of those that did, by name; ended: of all cells, any of a measurement."""
    if broken:
        return f"; broke off: {', '.join(broken)}", False, broken
    if not ended:
        raise Undecided("none ran")
    return "", True, ended, lost


def different_programs(
    served: Mapping[str, Hashable], evidence: Any, what: str, planned: Mapping[str, str]
) -> Claim:
    """Claim that all path witnesses differ, or a program would be compared with itself.
    planned: outcome of each planned one, by name."""
    if len(planned) == 1:
        return Claim.not_here(f"{what} are different programs", "this run is of one")
    different = len(set(served.values()))
    claim = Claim(
        f"the {len(served)} {what} that ran are {different} different programs",
        verdict_of(different == len(served)) if len(served) > 1 else "INCONCLUSIVE",
        evidence,
    )
    lost = (name for name, ended in planned.items() if ended not in ANSWERS)
    return claim.over(name for name in lost if name not in served)
