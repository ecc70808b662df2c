"""Registry of faults, programs and controls, the label due for each, and where it runs.

Programs are the scripts of the hang detector's benchmark, each with its due label in its header;
faults and controls are subjects of trials. Both are with the tests, in `folder()`.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from nsa.spelling import nearest
from workbook.runs.environment import PACKAGE

GROUPS = "healthy", "hang", "slow", "fails", "planted"
PLACE = Path("tests/whyhung/programs")


@dataclass(frozen=True)
class Fault:
    """Subject with something planted in it, or, for a control, with nothing; or a program."""

    name: str
    due: str  # the judge's due label: HANG:lock, PASS or SLOW, ...
    where: str  # "module:class" of the faults, "" of a program
    text: str  # what is planted
    settings: dict[str, Any] = field(default_factory=dict)  # for the subject
    steps: int = 6
    ranks: int = 1
    needs: str = ""  # "gpu" or "gpus2"
    control: bool = False
    predicted_s: float | None = None  # the steps of a healthy one, None if irrelevant
    deadline_s: float = 40.0
    busy: bool = False  # it needs a dedicated core, or its time counts
    takes_s: float = 10.0  # approximate duration: the longest begin first
    beside: bool = False  # another process uses the device meanwhile
    group: str = "planted"
    batch: str = "first"  # or "frozen": written after the rules were frozen
    certifiable: bool = False  # provable from outside that it can never proceed
    line: str = ""  # the function that a report must name; several: "bleu or auc"
    rank: int | None = None  # the one to blame, None if none or several
    script: str = ""  # file of a program
    command: tuple[str, ...] = ()  # command that starts it

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of verdict that are due; several if the machine's speed decides."""
        return tuple(one.partition(":")[0] for one in self.due.split(" or "))

    @property
    def subject(self) -> str:
        """Script to run, or an import path as in a trial's spec."""
        return self.script or f"faults.{self.where}"


def _forms(name: str, group: str, due: str, text: str, **more: Any) -> tuple[Fault, ...]:
    """Make both forms of a training that becomes slow, or fails by itself."""
    limits = {"predicted_s": 1.0, "deadline_s": 6.0} if group == "slow" else {"deadline_s": 45.0}
    known = {"due": due, "where": f"ends:{name}", "text": text, "group": group, **limits, **more}
    return tuple(Fault(f"{name} {form}", settings={"form": form}, **known) for form in (0, 1))


def folder() -> Path:
    """Return the folder of programs and faults, and add it to `sys.path`. ValueError if it is
    missing: it is part of a clone of the repository and not of an installed package."""
    for place in (PACKAGE.parent / PLACE, Path.cwd() / PLACE):
        if (place / "hang_programs.py").is_file():
            if str(place) not in sys.path:
                sys.path.append(str(place))
            return place
    raise ValueError(
        f"{PLACE} is neither beside the package nor in {Path.cwd()}: what the selfcheck runs is "
        "not installed with nsa; run it in a clone of the repository"
    )


@cache
def listed() -> dict[str, tuple[Fault, ...]]:
    """Faults, controls and both forms of each end, from faults.yaml: planted, controls, ends."""
    import yaml

    told = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text(encoding="utf-8"))
    return {
        "planted": tuple(Fault(**one) for one in told["planted"]),
        "controls": tuple(Fault(**one, control=True) for one in told["controls"]),
        "ends": tuple(form for one in told["ends"] for form in _forms(**one)),
    }


@cache
def every() -> tuple[Fault, ...]:
    """All that is listed, and a fault for each run of a program."""
    folder()
    import hang_programs

    runs = [(program, form) for program in hang_programs.chosen() for form in program.runs]
    return (*sum(listed().values(), ()), *(_run(*run) for run in runs))


def _run(program: Any, form: str) -> Fault:
    """Make the fault of a program's run; only kinds are due, without the words after them."""
    kinds = dict.fromkeys(label.partition(":")[0] for label in program.due)
    quiet = program.quiet if program.healthy else 25.0
    return Fault(
        name=f"{program.name} {form}".strip(),
        # On a busy machine a healthy program may be late.
        due="PASS or SLOW" if program.healthy else " or ".join(kinds),
        where="",
        text=program.text,
        settings={"program": program.name},
        ranks=max(program.ranks, program.spawns),
        needs="gpus2" if program.group == "gpu" else "",
        control=program.healthy,
        deadline_s=60.0 + 3 * quiet,
        takes_s=10.0 + quiet,
        group="healthy" if program.healthy else "hang",
        batch={"first": "first", "late": "frozen"}[program.written],
        certifiable=program.due[0].startswith("HANG:"),
        line=" or ".join(program.lines),
        rank=program.guilty[0] if len(program.guilty) == 1 else None,
        script=str(program.path),
        command=tuple(program.command(form)),
    )


def chosen(
    names: Iterable[str] = (), groups: Iterable[str] = (), batches: Iterable[str] = ()
) -> tuple[Fault, ...]:
    """Select faults by names, groups and batches, in the registry's order; all if none is given.

    A program's name selects all its runs. Raises ValueError for an unknown name, with the nearest,
    and for a group or batch without members.
    """
    names, groups, batches = list(names), list(groups), list(batches)
    known = [name for fault in every() for name in _names(fault)]
    for name in names:
        if name not in known:
            raise ValueError(f"no fault, control or program {name!r}; {nearest(name, known, 0)}")
    found = tuple(
        fault
        for fault in every()
        if (not names or set(_names(fault)) & set(names))
        and (not groups or fault.group in groups)
        and (not batches or fault.batch in batches)
    )
    if not found:
        raise ValueError(f"nothing is of group {groups}, batch {batches} and named {names}")
    return found


def _names(fault: Fault) -> tuple[str, ...]:
    forms = fault.group in ("slow", "fails")
    return fault.name, fault.settings.get("program", fault.name[:-2] if forms else fault.name)


def why_not(fault: Fault, gpus: int) -> str:
    """Reason why a machine with this many GPUs cannot run it; "" if it can."""
    needed = {"": 0, "gpu": 1, "gpus2": 2}[fault.needs]
    return f"needs {needed} GPU(s), here are {gpus}" if gpus < needed else ""
