"""Registry of faults, programs and controls, the label due for each, and where it runs.

Programs are the scripts of the hang detector's benchmark, each with its due label in its header;
faults and controls are subjects of trials. Both are with the tests, in `folder()`.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, partial
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


_control = partial(Fault, control=True)
_NCCL = {"settings": {"communication": "nccl"}, "ranks": 2, "needs": "gpus2"}

PLANTED: tuple[Fault, ...] = (
    # gradients
    Fault("detached branch", "FAIL:missing-grad", "wrong:SpoiltNSA",
          "keys and values of the window are computed without a graph",
          settings={"plant": "detached"}),
    Fault("gate x 0", "FAIL:zero-grad", "wrong:SpoiltNSA",
          "the window's gate is multiplied by zero: gradients arrive, all zero",
          settings={"plant": "gate x 0"}),
    Fault("argmax", "FAIL:missing-grad", "wrong:ChosenGate",
          "an argmax chooses, so that what it chooses by gets no gradient"),
    Fault("detached late", "FAIL:missing-grad", "wrong:DetachedLate",
          "a layer that the loss reaches in the first steps only"),
    Fault("empty softmax row", "FAIL:nan-grad", "wrong:EmptyRow",
          "a row masked throughout: a finite loss, NaN in the gradients",
          settings={"additive": True}),
    Fault("fp16 AdamW", "FAIL:nan-grad", "wrong:HalfAdam",
          "an eps of 1e-8 is 0 in fp16: the weights become NaN"),
    Fault("changed recomputation", "FAIL:checkpoint-mismatch", "wrong:Recomputed",
          "a checkpointed block takes another branch when it is recomputed",
          settings={"spoilt": True}),
    # ends
    Fault("in-place", "CRASH:RuntimeError", "stops:Overwritten",
          "a tensor that the backward needs is changed in place"),
    Fault("missing shard", "CRASH:KeyError", "stops:Raises", "a KeyError in the middle of a step"),
    Fault("killed", "CRASH:SIGKILL", "stops:Killed", "killed without a word"),
    Fault("segfault", "CRASH:SIGSEGV", "stops:BadPointer", "a read at a bad address"),
    Fault("aborted", "CRASH:SIGABRT", "stops:Aborts", "abort(), as C++ does"),
    Fault("exit 3", "CRASH:SystemExit", "stops:Leaves", "sys.exit(3) in the middle"),
    Fault("early exit 0", "CRASH:exit 0", "stops:LeavesSilently",
          "ends as if all were well, with steps left to do"),
    Fault("one huge tensor", "OOM:host", "stops:TooLarge", "2^55 bytes at once"),
    # waits
    Fault("loop in backward", "SLOW:uncounted", "stops:LoopInBackward",
          "a while that never ends, in a backward of its own", busy=True, deadline_s=20.0),
    Fault("GIL held asleep", "HANG:lock", "stops:LockedCall",
          "a C call that waits for a lock and keeps the GIL"),
    Fault("loader asleep", "STALLED:timer", "stops:SleepingLoader", "data that does not come"),
    Fault("native loop", "SLOW:uncounted", "stops:NativeLoop",
          "C code without the GIL that does not end", deadline_s=20.0, busy=True, takes_s=30.0),
    # growth
    Fault("kept tensors", "FAIL:tensor-list", "wrong:KeptTensors",
          "a list that grows by 2 MiB a step", steps=30),
    Fault("kept graph", "FAIL:graph-growth", "wrong:KeptGraph",
          "a running sum of a parameter that is never detached: the graph grows", steps=30),
    Fault("kept losses", "FAIL:graph-kept", "wrong:KeptLosses",
          "a running sum of losses with their graphs", steps=30),
    Fault("reference cycle", "FAIL:cycle", "wrong:Cycle",
          "objects that hold each other, and a collector that is off", steps=30),
    Fault("kept masks", "FAIL:tensor-list", "wrong:KeptMasks",
          "a dense mask kept for every T that was seen", steps=30),
    Fault("quadratic buffer", "FAIL:quadratic", "wrong:Dense",
          "attention keeps a T x T matrix for its backward", settings={"tokens": 64}),
    # pace
    Fault("recompilations", "SLOW:recompile", "stops:Recompiles", "each step compiles anew",
          steps=16, busy=True),
    # ranks
    Fault("rank's own branch", "FAIL:ranks-differ", "devices:OwnBranch",
          "one rank leaves out a branch, which find_unused_parameters hides", ranks=2,
          settings={"find_unused_parameters": True}),
    Fault("other shape", "CRASH", "devices:OtherShape",
          "one rank brings another number of elements", ranks=2),
    Fault("one rank killed", "CRASH:SIGKILL", "devices:OneKilled", "SIGKILL of one rank", ranks=2),
    # devices
    Fault("device OOM", "OOM:device", "devices:TooMuch", "tensors until the device is full",
          needs="gpu"),
    Fault("spinning kernel", "SLOW:uncounted", "devices:Spins", "a kernel that spins for a minute",
          settings={"spin_s": 60.0}, needs="gpu", busy=True, deadline_s=25.0, takes_s=30.0),
    Fault("stream that waits for ever", "STALLED:device", "devices:NeverWritten",
          "a stream waits for a word of memory that nobody writes; the GPU is idle", needs="gpu"),
    Fault("device assertion", "CRASH", "devices:BadIndex", "an index beyond its table",
          needs="gpu"),
    Fault("kept on the device", "FAIL:tensor-list", "devices:KeptOnDevice",
          "a list on the device that grows by 2 MiB a step", needs="gpu", steps=30),
    Fault("skipped collective (NCCL)", "HANG", "devices:SkippedCollective",
          "one rank leaves out a collective and waits for the others", **_NCCL),
    Fault("one rank killed (NCCL)", "CRASH", "devices:OneKilled", "SIGKILL of one rank", **_NCCL),
    Fault("one rank without data (NCCL)", "SLOW or STALLED", "devices:OneWithoutData",
          "all ranks wait for one", **_NCCL),
)  # fmt: skip

CONTROLS: tuple[Fault, ...] = (
    _control("healthy", "PASS", "small:Small", "nothing"),
    _control("healthy NSA", "PASS", "small:TinyNSA", "nothing", steps=20),
    _control("slow loop at 100 % CPU", "SLOW", "stops:Slow",
             "one token at a time; its stacks are alike whenever one looks",
             settings={"tokens": 96}, steps=60, predicted_s=0.5, deadline_s=9.0, busy=True),
    _control("one-off allocation", "PASS", "wrong:OneAllocation", "192 MiB made late and kept",
             steps=30),
    _control("collected cycle", "PASS", "wrong:CollectedCycle",
             "cycles that the collector takes now and then", steps=30),
    _control("masked row", "PASS", "wrong:EmptyRow",
             "a row masked throughout, whose NaN its own backward stops",
             settings={"additive": False}),
    _control("other strides", "PASS", "wrong:OtherStrides",
             "gradients whose strides are not their parameters'"),
    _control("frozen part", "PASS", "wrong:FrozenPart", "a layer that is not trained"),
    _control("recomputation", "PASS", "wrong:Recomputed",
             "a checkpointed block that does as it did", settings={"spoilt": False}),
    _control("two ranks", "PASS", "devices:Ranks", "nothing, on two ranks", ranks=2),
    _control("healthy GPU", "PASS", "devices:OnDevice", "nothing, on a GPU", needs="gpu", steps=20),
    _control("long kernel", "PASS or SLOW", "devices:Spins", "a kernel that takes 7 s and ends",
             settings={"spin_s": 7.0}, needs="gpu", predicted_s=1.0, deadline_s=9.0, busy=True),
    _control("shared device", "INCONCLUSIVE", "devices:OnDevice",
             "another process has memory on the device", needs="gpu", beside=True, busy=True),
    _control("two ranks (NCCL)", "PASS", "devices:Ranks", "nothing, on two GPUs", **_NCCL),
)  # fmt: skip


def _forms(name: str, group: str, due: str, text: str, **more: Any) -> tuple[Fault, ...]:
    """Make both forms of a training that becomes slow, or fails by itself."""
    limits = {"predicted_s": 1.0, "deadline_s": 6.0} if group == "slow" else {"deadline_s": 45.0}
    known = {"due": due, "where": f"ends:{name}", "text": text, "group": group, **limits, **more}
    return tuple(Fault(f"{name} {form}", settings={"form": form}, **known) for form in (0, 1))


ENDS: tuple[Fault, ...] = (
    *_forms("growing_steps", "slow", "SLOW",
            "every step takes longer: earlier losses are gone through (0), a sleep that grows (1)",
            steps=24, line="add_all or rest"),
    *_forms("suddenly_slow", "slow", "SLOW",
            "from step 6 on a step takes 50 times as long: computes (0), waits for storage (1)",
            steps=12, line="augment"),
    *_forms("loader_gets_slower", "slow", "SLOW",
            "each batch takes longer: a log read anew, in a worker (0); slower storage, here (1)",
            steps=24, line="__getitem__", batch="frozen"),
    *_forms("no_number", "fails", "FAIL",
            "NaN from step 3: a logarithm of zero in the loss (0), a corrupt sample (1)"),
    *_forms("worker_raises", "fails", "CRASH",
            "a sample raises in a loader's worker (0), in a thread's future (1)",
            line="__getitem__"),
    *_forms("preloads_all", "fails", "OOM or CRASH",
            "all data is loaded under a limit on memory: tensors (0), Python's own bytes (1)",
            line="preload"),
)  # fmt: skip


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
def every() -> tuple[Fault, ...]:
    """All planted faults, the controls, and a fault for each run of a program."""
    folder()
    import hang_programs

    runs = [(program, form) for program in hang_programs.chosen() for form in program.runs]
    return (*PLANTED, *CONTROLS, *ENDS, *(_run(*run) for run in runs))


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
