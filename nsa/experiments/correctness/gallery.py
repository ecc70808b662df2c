"""The mutation gallery: each mutant looked at, taught and tested, in a copy of the project.

A copy runs in a child process; the code that this process has loaded stays as it is.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nsa.experiments.correctness.lessons import TELLS, UNTOLD, lesson
from nsa.experiments.correctness.mutants import MUTANTS, ROOT, Mutant, copy_of_the_project, mutant
from nsa.experiments.correctness.oracle import environment
from nsa.lab.process.trial import Outcome, run_child

RIGHT = "right"  # the name of the code as it is, beside the mutants'
_IN_COPY = "nsa.experiments.correctness.probe:in_copy"
_IN_COPIES = "nsa.experiments.correctness.probe:in_copies"
_LOOK = "nsa.experiments.correctness.probe:look"
_LEARN = "nsa.experiments.correctness.learning:learn"

# mutant -> (view, backend): where the mutated line shows.
SHOWS = {
    "one-query-causal": ("window", "sequential"),
    "heads-as-time": ("window", "sequential"),
    "current-block-dropped": ("selected", "reference"),
    "window-leak": ("window", "sequential"),
    "scores-see-the-future": ("selected", "reference"),
    "chunked-scores-see-the-future": ("selected", "gather"),
    "chunked-positions-restart": ("selected", "gather"),
    "late-binding-checkpoint": ("recomputed", "gather"),
    "inverted-mask": ("window", "sdpa"),
    "equation-9-wrong-sign": ("selected", "reference"),
    "equation-9-wrong-sign-in-the-band": ("selected", "gather"),
    "window-off-by-one": ("window", "masked"),
    "chunked-window-off-by-one": ("window", "gather"),
    "sequential-window-off-by-one": ("window", "sequential"),
    "compressed-block-seen-too-early": ("compressed", "masked"),
    "heads-select-alone": ("selected", "reference"),
    "kernel-window-off-by-one": ("window", "triton"),
    "kernel-forgets-the-first-blocks": ("selected", "triton"),
    "kernel-scores-another-group": ("selected", "triton"),
    "kernel-gate-gradient-of-another-branch": ("gate_gradient", "triton"),
    "kernel-gradient-overwritten": ("query_gradient", "triton"),
    "kernel-base-not-gated": ("mixed", "triton"),
}


@dataclass(frozen=True)
class Seen:
    """What one copy showed. picture [rows][columns], None where the child did not end well."""

    mutant: str
    view: str
    backend: str
    picture: list[list[float]] | None
    message: str


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The mutants of these names, each once, all for "all"; ValueError for an unknown one."""
    names = tuple(names)
    if names == ("all",):
        return tuple(one.name for one in MUTANTS)
    return tuple(dict.fromkeys(mutant(name).name for name in names))


def look_at(
    names: Sequence[str] = ("all",),
    *,
    device: str = "cpu",
    workers: int = 2,
    deadline_s: float = 120.0,
    folder: str | Path | None = None,
) -> list[Seen]:
    """What each mutant shows, and before them what the code as it is shows in the same views.

    In `workers` child processes at once; the kernels on `device`, "cuda" or, interpreted, "cpu".
    ValueError for an unknown mutant.
    """
    names = check_names(names)
    wanted = [(RIGHT, *view) for view in dict.fromkeys(SHOWS[name] for name in names)]
    wanted += [(name, *SHOWS[name]) for name in names]
    # Interpreted kernels take longest, so each worker gets its share of them. On a GPU each has a
    # process: what a fork takes along of CUDA does not work.
    wanted.sort(key=lambda one: one[2] == "triton")
    alone = [one for one in wanted if one[2] == "triton" and device != "cpu"]
    shared = [one for one in wanted if one not in alone]
    shares = [[one] for one in alone] + [shared[start::workers] for start in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        parts = pool.map(
            lambda share: _look_at(share, device, deadline_s, folder), filter(None, shares)
        )
        found = [seen for part in parts for seen in part]
    order = {name: number for number, name in enumerate((RIGHT, *names))}
    return sorted(found, key=lambda seen: order[seen.mutant])


def _look_at(
    share: Sequence[tuple[str, str, str]],
    device: str,
    deadline_s: float,
    folder: str | Path | None,
) -> list[Seen]:
    with tempfile.TemporaryDirectory(prefix="nsa-mutants-") as place:
        calls = []
        for number, (name, view, backend) in enumerate(share):
            root = _copy(None if name == RIGHT else mutant(name), Path(place, str(number)))
            on = device if backend == "triton" else "cpu"
            spec = {"view": view, "backend": backend, "device": on}
            calls.append({"root": str(root), "entry": _LOOK, "spec": spec})
        spec = {"calls": calls, "triton": any(backend == "triton" for *_, backend in share)}
        kept = None if folder is None else Path(folder, "looks-" + "-".join(share[0]))
        ended = run_child(
            _IN_COPIES, spec, deadline_s=deadline_s, folder=kept, env=environment(device)
        )
    lost = {"error": ended.message or ended.status}
    found = (ended.result or {}).get("found", [lost] * len(share))
    return [
        Seen(*asked, one.get("result", {}).get("picture"), one.get("error", ""))
        for asked, one in zip(share, found, strict=True)
    ]


def learn(
    names: Sequence[str],
    *,
    tokens: int | None = None,
    backend: str | None = None,
    device: str = "cpu",
    workers: int = 2,
    threads: int | None = 1,
    deadline_s: float = 120.0,
    precision: str = "fp32",
    batch: int = 16,
    folder: str | Path | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """A row a mutant that a lesson tells, and one of right attention a lesson: what each learnt.

    `tokens` and `backend` replace the lesson's own. A row has `mutant`, `lesson`, `backend`,
    `tokens`, `outcome`, `message`, `seconds` and what `learning.learn` found. Of a mutant that no
    lesson tells there is a row with outcome "untold" and the reason.
    """
    names = check_names(names)
    asked = {name: (TELLS[name][0], backend or TELLS[name][1], tokens or TELLS[name][2])
             for name in names if name in TELLS}  # fmt: skip
    wanted = [(RIGHT, *one) for one in dict.fromkeys(asked.values())]
    wanted += [(name, *one) for name, one in asked.items()]

    def spec_of(given: tuple[str, str, str, int]) -> dict[str, Any]:
        name, which, served_by, length = given
        changes = {"checkpoint": "all"} if name == "late-binding-checkpoint" else {}
        spec = lesson(which, length, backend=served_by, device=device, batch=batch,
                      precision=precision, **changes)  # fmt: skip
        return spec | {"threads": threads, "budget_s": 0.7 * deadline_s}

    specs = {given: spec_of(given) for given in wanted}

    def one(given: tuple[str, str, str, int]) -> dict[str, Any]:
        (name, which, served_by, length), spec = given, specs[given]
        kept = None if folder is None else Path(folder, f"lesson-{name}-{which}-{served_by}")
        ended = in_copy(name, _LEARN, spec, deadline_s=deadline_s, folder=kept, device=device)
        row = {"mutant": name, "lesson": which, "backend": served_by, "tokens": length}
        row |= {"outcome": ended.status, "message": ended.message, **(ended.result or {})}
        if progress:
            said = ended.message or f"as expected: {row['as_expected']}"
            print(f"{name}: {which}, {served_by}, T {length}: {ended.seconds:.1f} s, {said}",
                  file=sys.stderr, flush=True)  # fmt: skip
        return row | {"seconds": ended.seconds}

    # Right attention stops once it has learnt; what does not learn takes all of its lesson's steps.
    longest_first = sorted(
        wanted, key=lambda given: (given[0] == RIGHT, -specs[given]["train"]["steps"])
    )
    with ThreadPoolExecutor(workers) as pool:
        rows = dict(zip(longest_first, pool.map(one, longest_first), strict=True))
    return [rows[given] for given in wanted] + [
        {"mutant": name, "outcome": "untold", "message": UNTOLD[name], "seconds": 0.0}
        for name in names
        if name in UNTOLD
    ]


def kill(
    names: Sequence[str], *, workers: int = 2, deadline_s: float = 120.0, progress: bool = True
) -> list[dict[str, Any]]:
    """A row a mutant: runs its killers on a copy with that line changed, and says how they ended.

    `outcome` is "killed" (a test failed), "survived", "no tests" (this installation brings none) or
    "error"; `line` is pytest's own last one.
    """

    def one(name: str) -> dict[str, Any]:
        changed, began = mutant(name), time.monotonic()
        row = {"mutant": name, "killers": [k.partition("::")[2] for k in changed.killers]}
        if missing := [k for k in changed.killers if k not in known_tests()]:
            return row | {"outcome": "no tests", "line": f"not here: {missing[0]}", "seconds": 0.0}
        with tempfile.TemporaryDirectory(prefix="nsa-mutant-") as place:
            root = _copy(changed, Path(place))
            try:
                ended = run_tests(root, changed.killers, deadline_s=deadline_s)
                said = (ended.stdout.strip().splitlines() or [""])[-1]
                outcome = {0: "survived", 1: "killed"}.get(ended.returncode, "error")
            except subprocess.TimeoutExpired:
                outcome, said = "error", f"still running after {deadline_s:g} s"
        seconds = time.monotonic() - began
        if progress:
            print(f"{name}: {outcome}, {seconds:.1f} s", file=sys.stderr, flush=True)
        return row | {"outcome": outcome, "line": said, "seconds": seconds}

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, check_names(names)))


def run_tests(
    root: Path, tests: Sequence[str], *, deadline_s: float = 280.0
) -> subprocess.CompletedProcess:
    """pytest on some tests of a copy, which hides an installed nsa: the copy is its current folder.

    A test is named without its parameters; -k picks it among those of its file.
    """
    files = sorted({test.split("::")[0] for test in tests})
    picked = " or ".join(test.split("::")[1] for test in tests)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line"]
    without = ["-p", "no:cacheprovider", "-p", "no:nbval"]  # loading that takes as long as torch
    return subprocess.run(
        [*command, "-m", "not slow", *without, *files, "-k", picked],
        cwd=root, capture_output=True, text=True, timeout=deadline_s, check=False,
    )  # fmt: skip


@cache
def known_tests() -> frozenset[str]:
    """The project's test functions, as "tests/room/test_x.py::test_y"; empty without tests."""
    import ast

    found = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.add(f"{file.relative_to(ROOT)}::{node.name}")
    return frozenset(found)


def in_copy(
    name: str,
    entry: str,
    spec: dict,
    *,
    deadline_s: float,
    folder: str | Path | None = None,
    device: str = "cpu",
) -> Outcome:
    """`entry` with `spec` in a child process that imports the mutant's copy; RIGHT: the original's.

    On a CPU Triton's kernels are interpreted.
    """
    with tempfile.TemporaryDirectory(prefix="nsa-mutant-") as place:
        root = _copy(None if name == RIGHT else mutant(name), Path(place))
        given = {"root": str(root), "entry": entry, "spec": spec}
        return run_child(
            _IN_COPY, given, deadline_s=deadline_s, folder=folder, env=environment(device)
        )


def _copy(changed: Mutant | None, place: Path) -> Path:
    root = copy_of_the_project(place)
    if changed is not None:
        changed.apply(root)
    return root
