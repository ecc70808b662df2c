"""The benchmark's programs say what is due, and its scorer counts what a tool says."""

import ast
import json
import pathlib
import re
import sys
import time

import pytest
import score
from hang_programs import FOLDER, GROUPS, chosen, read
from hang_runs import Run, parents

PROGRAMS = chosen()
STUB = """
import pathlib, subprocess, sys, time
folder, said = pathlib.Path(sys.argv[3]), {said!r}
child = subprocess.Popen(sys.argv[sys.argv.index("--") + 1 :])
time.sleep(1.5)
for line in said:
    print("whyhung watch:", line, file=sys.stderr, flush=True)
    if "HANG" in line:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.txt").write_text(line + chr(10) + "HANG:lock; rule: stub")
sys.exit(child.wait())
"""


def test_programs_say_what_is_due_and_which_of_their_functions_is_to_be_named():
    assert PROGRAMS
    for program in PROGRAMS:
        name = f"{program.group}-{program.name}"
        source = program.path.read_text()
        tree = ast.parse(source)
        assert set(program.lines) <= set(re.findall(r"\bdef (\w+)\(", source)), name
        assert program.healthy or program.lines, name
        marks = ("quiet", "over") if program.healthy else ("fault",)
        for mark in marks:
            assert f'print("{mark}", flush=True)' in source, name
        imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(one.split(".")[0] in ("nsa", "hang_runs") for one in imported), name
        lines = source.splitlines()
        assert len(lines) <= 90, name
        after = [line for line in lines if line.startswith("#") and line.endswith(".")]
        assert after, f"{name}: a sentence after the header says what is true"


def test_ranks_and_times_agree_with_the_kind():
    for program in PROGRAMS:
        name = f"{program.group}-{program.name}"
        if program.healthy:
            assert program.quiet >= (40 if program.group == "gpu" else 20), name
            assert "SCALE" in program.path.read_text(), name
        else:
            assert program.within == (30 if program.group == "gpu" else 60), name
            assert bool(program.guilty) == (max(program.ranks, program.spawns) > 1), name
        assert "" not in program.runs or len(program.runs) == 1, name


@pytest.mark.parametrize("group", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", ["hang", "healthy"])
def test_a_third_of_the_programs_was_written_after_the_rules(group, kind):
    late = len(chosen(group, written="late", kind=kind))
    every = len(chosen(group, kind=kind))
    assert every >= (20 if kind == "hang" else 12)
    assert 0.28 <= late / every <= 0.45


def test_sixty_healthy_runs_are_there_for_a_cpu():
    assert sum(len(program.runs) for program in chosen("cpu", kind="healthy")) >= 60


@pytest.mark.parametrize(
    "header, said",
    [
        ("import os", "wanted is '# due"),
        ("# due: HANG:lock; within: 60", "wanted is '# due"),
        ("# due: HANG:lock; within: 60; set: third", "wanted is '# due"),
        ("# due: HANG:lock; lines: main; within: 60; set: late", "wanted is '# due"),
        ("# due: HANG:lock; line: main; set: late", "has no `within"),
        ("# due: healthy; within: 60; set: late", "has no `quiet"),
    ],
)
def test_a_header_that_says_too_little_is_refused(tmp_path, header, said):
    path = tmp_path / "cpu.py"
    path.write_text(header + "\n")
    with pytest.raises(ValueError, match=said):
        read(path)


def test_a_header_goes_on_after_a_semicolon_at_the_end_of_a_line(tmp_path):
    path = tmp_path / "cpu.py"
    path.write_text(
        "# due: HANG:lock or STALLED;\n# within: 9; rank: 0 or 1; set: first\n# Said;\n"
    )
    program = read(path)
    assert (program.due, program.within, program.guilty) == (("HANG:lock", "STALLED"), 9, (0, 1))


@pytest.mark.parametrize(
    "said, ranks",
    [
        ("rank 1 has not called all_reduce number 61", {1}),
        ("ranks 0, 2 and 5-7 wait", {0, 2, 5, 6, 7}),
        ("missing ranks: {1, 3}", {1, 3}),
        ("all_reduce number 1", set()),
    ],
)
def test_ranks_are_read_from_what_is_said(said, ranks):
    assert score.named_ranks(said) == ranks


def test_a_label_without_a_kind_allows_any_kind_and_no_other_verdict():
    assert score.is_due("HANG:gil", ["HANG"]) and score.is_due("HANG", ["HANG"])
    assert not score.is_due("HANG:gil", ["HANG:lock", "STALLED"])
    assert not score.is_due("HANG", ["HANG:lock"])


def stub(tmp_path, *said):
    """Returns the command of a tool that says these lines 1.5 s after it was started."""
    path = tmp_path / "stub.py"
    path.write_text(STUB.format(said=said))
    return f"{sys.executable} {path}"


def scored(tmp_path, tool, only, *options):
    out = tmp_path / "out"
    given = ["--whyhung", tool, "--only", only, "--keep", "1", "--seconds", "4", "--out", str(out)]
    score.main([*given, "--jobs", "3", *options])
    return {row["program"]: row for row in json.loads((out / "rows.json").read_text())}


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.real_starts
def test_a_scorer_counts_what_is_told_and_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HANGS_SCALE", "0.1")
    tool = stub(tmp_path, "HANG: rank 0 waits at nested_submit.py:12 read_shard")
    rows = scored(tmp_path, tool, "nested_submit,daemon_keeps_pipe,thread_pool")
    hang = rows["nested_submit"]
    assert hang["told"] and hang["line"] and hang["right"] and hang["valid"]
    assert hang["said"] == "HANG:lock" and 0 <= hang["seconds"] < 60 and not hang["withdrawn"]
    other = rows["daemon_keeps_pipe"]
    assert other["told"] and not other["line"] and not other["right"]
    assert rows["thread_pool --work wait"]["told"], "a healthy one accused is counted"
    assert "2 of 2 accused" in capsys.readouterr().out
    ours = [path for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if here(path, tmp_path)]
    assert not ours and parents()


def here(path, folder):
    try:
        return str(folder) in path.read_text()
    except OSError:
        return False


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.real_starts
def test_what_is_withdrawn_and_what_is_never_told_is_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HANGS_SCALE", "0.05")
    tool = stub(tmp_path, "HANG: nothing of it", "it moves again: HANG:lock is withdrawn")
    row = scored(tmp_path, tool, "nested_submit")["nested_submit"]
    assert row["told"] and row["withdrawn"] == 1
    rows = scored(tmp_path, stub(tmp_path), "nested_submit,backs_off")
    assert not rows["nested_submit"]["told"] and not rows["backs_off --pauses one"]["told"]
    said = capsys.readouterr().out
    assert "0 of 1 told, 0 in time" in said and "0 of 2 accused" in said


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.real_starts
@pytest.mark.parametrize("tool", ["torch", "frtrace"])
def test_tools_that_read_dumps_find_nothing_in_a_healthy_program(tmp_path, monkeypatch, tool):
    monkeypatch.setenv("HANGS_SCALE", "0.1")
    row = scored(tmp_path, "none", "polls_for_a_file", "--tool", tool)["polls_for_a_file --every 1"]
    assert row["valid"] and not row["told"], row


def ran(program, form, folder, seconds):
    """(exit code or None, marks) of a run that ended, or hung for a second."""
    run = Run(program.command(form), folder, {"HANGS_SCALE": "0.02"})
    try:
        end = time.monotonic() + seconds
        while run.look() is None and time.monotonic() < min(end, run.marks.get("fault", end) + 1):
            time.sleep(0.1)
        return run.look(), set(run.marks)
    finally:
        run.end(1)


CPU = [(program, form) for program in chosen("cpu") for form in program.runs]
HEALTHY = chosen("cpu", kind="healthy")
# One of each verdict that is due, and one in eight of those that are healthy: all others are
# `long`.
SOONER = {one.due[0]: one for one in reversed(chosen("cpu", kind="hang"))}.values()
SOONER = {(one.name, one.runs[0]) for one in (*SOONER, *HEALTHY[::8])}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.real_starts
@pytest.mark.parametrize(
    ("program", "form"),
    [
        pytest.param(p, form, marks=[] if (p.name, form) in SOONER else pytest.mark.long)
        for p, form in CPU
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_healthy_programs_end_and_hangs_do_not(program, form, tmp_path):
    code, marks = ran(program, form, tmp_path / "run", 120)
    assert (code, marks) == ((0, {"quiet", "over"}) if program.healthy else (None, {"fault"}))


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.real_starts
def test_three_programs_are_scored_with_whyhung_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGS_SCALE", "0.2")
    only = "nested_submit,join_before_get,thread_pool"
    rows = scored(tmp_path, f"{sys.executable} -m whyhung", only, "--seconds", "90")
    assert all(row["valid"] for row in rows.values()), rows
    assert rows["nested_submit"]["told"] and rows["nested_submit"]["line"]
    assert not any(row["told"] for row in rows.values() if row["healthy"])


@pytest.mark.parametrize("only, said", [("no_such", "no program is called no_such")])
def test_an_unknown_program_is_said_so(only, said):
    with pytest.raises(SystemExit, match=said):
        score.main(["--only", only, "--list"])


def test_programs_lie_where_they_are_looked_for():
    assert {path.parent.name for path in FOLDER.glob("*/*.py")} == {*GROUPS, "faults"}
