"""Mutation gallery: each mutant is pictured, trained and tested, in a copy of the project.

A copy runs in a child process; the code loaded in this process is unchanged.
"""

import ast
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from whyhung.process.trial import Outcome, run_child
from workbook.lab import sweep
from workbook.rooms.correctness.lessons import ENTRY, lesson, rows_of
from workbook.rooms.correctness.mutants import MUTANTS, ROOT, mutant, mutated_copy
from workbook.rooms.correctness.oracle import environment

RIGHT = "right"  # name of the unmodified code, beside the mutants'
_PROBE = "workbook.rooms.correctness.probe:"


@dataclass(frozen=True)
class Seen:
    """Result of one copy. picture [rows][columns], None if the child failed."""

    mutant: str
    view: str
    backend: str
    picture: list[list[float]] | None
    message: str


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the mutant names, each once, all for "all"; ValueError for an unknown one."""
    names = tuple(dict.fromkeys(names))
    if names == ("all",):
        return tuple(MUTANTS)
    for name in names:
        mutant(name)
    return names


def look_at(
    names: Sequence[str] = ("all",), *, device: str = "cpu", workers: int = 2, **how: Any
) -> list[Seen]:
    """Picture each mutant and, first, the unmodified code in the same views.

    Uses up to `workers` child processes; kernels run on `device`, "cuda" or, interpreted, "cpu".
    `how`: deadline_s (120) and folder of sweep.measure. Raises ValueError for an unknown mutant.
    """
    shows = {name: mutant(name).shows for name in check_names(names)}
    wanted = [(RIGHT, *view) for view in dict.fromkeys(shows.values())]
    wanted += [(name, *view) for name, view in shows.items()]
    # Interpreted kernels take longest, so each worker gets its share of them. On a GPU each has a
    # process, because a forked child cannot use CUDA.
    wanted.sort(key=lambda one: one[2] == "triton")
    alone = [one for one in wanted if one[2] == "triton" and device != "cpu"]
    shared = [one for one in wanted if one not in alone]
    shares = [[one] for one in alone] + [shared[start::workers] for start in range(workers)]
    shares = list(filter(None, shares))

    def spec(share: Sequence[tuple[str, str, str]], _: float) -> dict[str, Any]:
        calls = []
        for name, view, backend in share:
            on = device if backend == "triton" else "cpu"
            look = {"view": view, "backend": backend, "device": on}
            calls.append({"mutant": name, "entry": _PROBE + "look", "spec": look})
        return {"calls": calls, "triton": any(backend == "triton" for *_, backend in share)}

    ended = sweep.measure(
        _PROBE + "in_copies",
        shares,
        spec,
        workers=workers,
        env=environment(device),
        name=lambda share: "-".join(share[0]),
        progress=False,
        run=_with_copies,
        **{"deadline_s": 120.0, **how},
    )
    found = []
    for share, child in zip(shares, ended, strict=True):
        lost = {"error": child.message or child.status}
        told = (child.result or {}).get("found", [lost] * len(share))
        for asked, one in zip(share, told, strict=True):
            picture = one.get("result", {}).get("picture")
            found.append(Seen(*asked, picture, one.get("error", "")))
    order = [RIGHT, *shows]
    return sorted(found, key=lambda seen: order.index(seen.mutant))


def learn(
    names: Sequence[str],
    *,
    tokens: int | None = None,
    device: str = "cpu",
    precision: str = "fp32",
    **how: Any,
) -> list[dict[str, Any]]:
    """Train each mutant that a lesson detects, and correct attention per lesson; a row each.

    `tokens` overrides the lesson's own. A row has `mutant`, `lesson`, `backend`, `tokens` and the
    fields of `lessons.rows_of`. A mutant that no lesson detects has a row with outcome "untold"
    and the reason. `how`: deadline_s (120), workers (2) and folder of sweep.measure.
    """
    taught = {name: mutant(name).lesson for name in check_names(names)}
    asked = {
        name: (*told[:2], tokens or told[2])
        for name, told in taught.items()
        if not isinstance(told, str)
    }
    untold = [
        {"mutant": name, "outcome": "untold", "message": why, "seconds": 0.0}
        for name, why in taught.items()
        if name not in asked
    ]
    wanted = [(RIGHT, *one) for one in dict.fromkeys(asked.values())]
    wanted += [(name, *one) for name, one in asked.items()]
    specs, steps = {}, {}
    for one in wanted:
        name, which, backend, length = one
        specs[one] = {"name": which, "tokens": length, "backend": backend, "device": device}
        specs[one] |= {"precision": precision}
        if name == "late-binding-checkpoint":
            specs[one]["checkpoint"] = "all"
        steps[one] = lesson(**specs[one]).stages[-1].train.steps
    # Correct attention stops once it has learnt; others take all of their lesson's steps.
    longest_first = sorted(wanted, key=lambda one: (one[0] == RIGHT, -steps[one]))
    rows = rows_of(
        {one: specs[one] for one in longest_first},
        threads=1,
        entry=_PROBE + "in_copy",
        call=lambda one, spec: {"mutant": one[0], "entry": ENTRY, "spec": spec},
        env=environment(device),
        name=lambda one: "{}: {}, {}, T {}".format(*one),
        run=_with_copies,
        **{"deadline_s": 120.0, "workers": 2, **how},
    )
    fields = ("mutant", "lesson", "backend", "tokens")
    return [dict(zip(fields, one, strict=True)) | rows[one] for one in wanted] + untold


def kill(
    names: Sequence[str], *, workers: int = 2, deadline_s: float = 120.0, progress: bool = True
) -> list[dict[str, Any]]:
    """Run each mutant's killer on a copy with that line changed; return a row per mutant.

    `outcome` is "killed" (the test failed), "survived", "no tests" (not in this installation) or
    "error"; `line` is the last line of pytest's output.
    """

    def one(_: str | None, name: str) -> dict[str, Any]:
        killer, began = mutant(name).killer, time.monotonic()
        if killer not in known_tests():
            return {"mutant": name, "outcome": "no tests", "line": f"not here: {killer}"}
        with tempfile.TemporaryDirectory(prefix="nsa-mutant-") as place:
            try:
                ended = run_tests(mutated_copy(place, name), [killer], deadline_s=deadline_s)
                line = (ended.stdout.strip().splitlines() or [""])[-1]
                outcome = {0: "survived", 1: "killed"}.get(ended.returncode, "error")
            except subprocess.TimeoutExpired:
                outcome, line = "error", f"still running after {deadline_s:g} s"
        if progress:
            seconds = time.monotonic() - began
            print(f"{name}: {outcome}, {seconds:.1f} s", file=sys.stderr, flush=True)
        return {"mutant": name, "outcome": outcome, "line": line}

    return sweep.each(one, check_names(names), workers=workers)


def run_tests(
    root: Path, tests: Sequence[str], *, deadline_s: float
) -> subprocess.CompletedProcess:
    """Run pytest on some tests of a copy, which shadows an installed nsa as the current folder.

    A test is named without its parameters; -k selects it within its file.
    """
    command = [sys.executable, "-m", "pytest", *arguments_for(tests)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=deadline_s)


def arguments_for(tests: Sequence[str]) -> list[str]:
    """Arguments of pytest to run these tests, up to the first failure."""
    files = sorted({test.split("::")[0] for test in tests})
    picked = " or ".join(test.split("::")[1] for test in tests)
    # Loading nbval takes as long as torch.
    plain = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:nbval"]
    return [*plain, "-m", "not slow and not long", *files, "-k", picked]


@cache
def known_tests() -> frozenset[str]:
    """Test functions of the project, as "tests/room/test_x.py::test_y"; empty without tests."""
    return frozenset(
        f"{file.relative_to(ROOT)}::{node.name}"
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def _with_copies(entry: str, spec: dict[str, Any], **how: Any) -> Outcome:
    """Call `run_child` with a copy of the project for each call of the spec, its mutant applied."""
    with tempfile.TemporaryDirectory(prefix="nsa-mutants-") as place:
        for number, call in enumerate(spec.get("calls", [spec])):
            name = "" if call["mutant"] == RIGHT else call["mutant"]
            call["root"] = str(mutated_copy(Path(place, str(number)), name))
        return run_child(entry, spec, **how)
