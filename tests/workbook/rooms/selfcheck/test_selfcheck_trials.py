"""The lab's check of itself: blind, complete, and loud about a miss."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import pytest
from judged_rows import control, row, skipped, well

from whyhung.verdict import Verdict, judge
from whyhung.watch.evidence import End, Evidence, P, Process, Sample, Snapshot, Thread
from workbook.cli import main as cli
from workbook.cli import selfcheck as command
from workbook.rooms.selfcheck import trials as selfcheck
from workbook.rooms.selfcheck.judged import Judged, blind, read
from workbook.rooms.selfcheck.registry import chosen, every, listed

PLANTED, CONTROLS, ENDS = listed().values()


def telling(fault):
    """Evidence that names the fault in every field that can hold a name."""
    module, _, name = fault.subject.partition(":")
    file = f"/some/where/tests/whyhung/programs/{module.replace('.', '/')}.py"
    frames = (f"{file}:12 fetch", f"{name}.step")
    process = Process(7, rank=0, threads=(Thread(7, main=True, frames=frames),))
    trace = f'Traceback:\n  File "{file}", line 3, in step\nRuntimeError: {name} in {module}'
    evidence = Evidence(
        spec={"subject": fault.subject, "settings": fault.settings | {"name": name}, "steps": 6},
        samples=[Sample(0.5, 0, P(0, "data", phases=1), beats=3, cpu_s=0.1, state="S")],
        snapshots=[Snapshot(1.0, (process,))],
        end=End("exception", 1, "RuntimeError", f"{fault.subject} failed", trace),
        notes=[f"made by {fault.subject}"],
        losses=[1.0],
    )
    evidence.again = Evidence.from_dict(evidence.to_dict())
    return evidence


def test_the_judge_never_sees_what_was_planted():
    told = {}
    for fault in every():
        if not fault.script:
            module, _, name = fault.subject.partition(":")
            seen = json.dumps(blind(telling(fault), fault).to_dict())
            words = (fault.subject, module, name, "settings", "whyhung")
            told[fault.name] = [word for word in words if word in seen]
    assert len(told) == len([*PLANTED, *CONTROLS, *ENDS]) > 60
    assert {name: words for name, words in told.items() if words} == {}


def test_a_judge_that_saw_the_subject_would_be_noticed():
    (fault,) = chosen(["missing shard"])
    assert fault.subject in json.dumps(telling(fault).to_dict())


def test_the_blind_evidence_is_otherwise_the_same():
    (fault,) = chosen(["missing shard"])
    before, after = telling(fault), blind(telling(fault), fault)
    assert after.samples == before.samples and after.losses == before.losses
    assert after.spec == {"steps": 6}
    assert after.end.type == "RuntimeError"
    assert after.again.spec == {"steps": 6}
    assert judge(after).kind == judge(before).kind == "CRASH"


def test_a_trial_asks_for_the_same_oracles_whatever_is_planted():
    assert (
        len({selfcheck.spec(fault).oracles for fault in every() if fault.group == "planted"}) == 1
    )


def test_what_is_slow_or_fails_is_run_once():
    asked = selfcheck.spec(chosen(["no_number 1"])[0])
    assert asked.oracles == () and asked.settings == {"form": 1}
    assert (asked.subject, asked.env["CUDA_VISIBLE_DEVICES"]) == ("faults.ends:no_number", "")


def test_programs_are_scaled_and_one_that_leaves_nothing_is_an_error(tmp_path, monkeypatch):
    asked = {}

    class Run:
        def __init__(self, command, folder, environment):
            asked.update(environment, command=command)

        def look(self):
            return 2

        def end(self):
            asked["ended"] = True

        def err(self):
            return "whyhung: no"

    monkeypatch.setattr("hang_runs.Run", Run)
    (fault,) = chosen(["sleeps_until_its_time --how event"])
    with pytest.raises(RuntimeError, match="--how event left no evidence: whyhung: no"):
        selfcheck.plant(fault, folder=tmp_path / "000", scale=0.25)
    assert asked["HANGS_SCALE"] == "0.25" and asked["CUDA_VISIBLE_DEVICES"] == ""
    line = " ".join(asked["command"]).partition(" -- ")[2]
    assert asked["ended"] and line == f"{sys.executable} subject.py --how event"


@pytest.mark.processes
@pytest.mark.full
def test_a_program_is_watched_as_its_user_would(tmp_path):
    (fault,) = chosen(["sleeps_until_its_time --how event"])
    row = selfcheck.plant(fault, folder=tmp_path / "000", scale=0.04)
    assert row.right and row.found == "PASS", str(row)
    kept = json.loads((tmp_path / "000" / "evidence.json").read_text())
    assert kept["end"]["how"] == "returned" and "over" in (tmp_path / "000/out.txt").read_text()
    assert "sleeps_until" not in json.dumps(kept) and "programs" not in json.dumps(kept)


class Supervisor:
    """A runner that runs nothing and keeps in which folders it was asked to, and how many at once.

    Every verdict is PASS.
    """

    def __init__(self, monkeypatch, seconds=0.0):
        self.folders, self.at_once, self.most, self.seconds = [], 0, 0, seconds
        self.options, self.reports = {}, []
        self._lock = threading.Lock()
        monkeypatch.setattr(selfcheck.runner, "run", self.run)
        monkeypatch.setattr(selfcheck, "watched", self.watched)
        monkeypatch.setattr(selfcheck, "judge", self.judge)
        monkeypatch.setattr(selfcheck, "busy_loops", lambda count: nullcontext())

    def watched(self, fault, folder, scale, stop, **options):
        self.options[fault.settings["program"]] = options
        evidence = self.run(None, folder=folder)
        return Evidence(spec={"command": "a b"}, reports=evidence.reports)

    def run(self, spec, *, folder, **options):
        with self._lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            self.folders.append(folder)
        time.sleep(self.seconds)
        with self._lock:
            self.at_once -= 1
        folder.mkdir(parents=True)
        return Evidence(spec=spec.to_dict() if spec else {}, reports=self.reports)

    def judge(self, evidence):
        assert not {"subject", "command"} & evidence.spec.keys()
        return Verdict("PASS")


def test_rows_come_in_the_registrys_order_for_each_round(monkeypatch):
    supervisor = Supervisor(monkeypatch)
    rows = selfcheck.check(chosen(["healthy", "killed", "device OOM"]), rounds=2, gpus=0)
    folders = {f"{folder.parent.name}/{folder.name}" for folder in supervisor.folders}
    assert folders == {f"round-{n}/{i}" for n in (1, 2) for i in ("000", "002")}  # names no fault
    assert [(r.name, r.round, r.found) for r in rows] == [
        ("killed", 1, "PASS"), ("device OOM", 1, "not run"), ("healthy", 1, "PASS"),
        ("killed", 2, "PASS"), ("device OOM", 2, "not run"), ("healthy", 2, "PASS"),
    ]  # fmt: skip
    assert [r.missed for r in rows[:3]] == [True, False, False]
    assert rows[1].skipped == "needs 1 GPU(s), here are 0"


def test_what_computes_runs_one_at_a_time_beside_what_waits(monkeypatch):
    supervisor = Supervisor(monkeypatch, seconds=0.1)
    busy = [fault for fault in PLANTED if fault.busy and not fault.needs]
    selfcheck.check(busy, gpus=0, workers=4)
    assert supervisor.most == 1
    waiting = [fault for fault in PLANTED if not fault.busy and not fault.needs][:8]
    selfcheck.check([*busy[:2], *waiting], gpus=0, workers=3)
    assert supervisor.most == 4


def test_parts_are_all_of_it_and_no_trial_twice(monkeypatch):
    Supervisor(monkeypatch)
    few = chosen(["reads_from_pipeline", "stopped_helper", "missing shard"])
    parts = [selfcheck.check(few, rounds=2, gpus=0, part=(n, 3)) for n in (1, 2, 3)]
    told = [(row.name, row.round) for rows in parts for row in rows]
    assert sorted(told) == sorted((fault.name, n) for fault in few for n in (1, 2))


def test_deadlines_are_longer_beside_busy_loops_and_a_stall_ends_only_what_is_not_healthy(
    monkeypatch,
):
    supervisor = Supervisor(monkeypatch)
    both = chosen(["reads_from_pipeline --stages one", "stopped_helper --heartbeat no"])
    selfcheck.check(both, gpus=0)
    alone = supervisor.options["reads_from_pipeline"]["deadline_s"]
    selfcheck.check(both, gpus=0, load=9)
    assert supervisor.options["reads_from_pipeline"]["deadline_s"] == 4 * alone
    kills = {name: (o["on_hang"], o["on_stall"]) for name, o in supervisor.options.items()}
    assert kills == {"reads_from_pipeline": ("kill", "report"), "stopped_helper": ("kill", "kill")}


@pytest.mark.processes
def test_busy_loops_end_whatever_ends_what_is_beside_them():
    def running():
        told = subprocess.run(
            ["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True
        )
        return told.stdout.decode().count("os.getppid()")

    with pytest.raises(KeyboardInterrupt), selfcheck.busy_loops(2):
        assert running() == 2
        raise KeyboardInterrupt
    assert running() == 0


def test_after_its_budget_nothing_begins_and_that_is_said(monkeypatch):
    Supervisor(monkeypatch)
    (row,) = selfcheck.check(chosen(["stopped_helper --heartbeat no"]), gpus=0, budget_s=1e-9)
    assert row.found == "not run" and "was over" in row.skipped


def test_a_row_has_what_was_said_meanwhile_and_what_program_it_is_of(monkeypatch):
    report = {"t": 9.0, "label": "STALLED:child", "rested_s": 7.5, "withdrawn": 11.0, "line": ""}
    Supervisor(monkeypatch).reports.append(report)
    (row,) = selfcheck.check(chosen(["reads_from_pipeline --stages one"]), gpus=0, load=1)
    assert row.reports == ({"label": "STALLED:child", "rested_s": 7.5, "withdrawn": True},)
    assert (row.group, row.load, row.line_named) == ("healthy", 1, None)
    assert row.ever("STALLED") and not row.ever("HANG") and row.right


LOCK, GLOO = "lock_reentered", "gloo_broadcast_alone --loader no"


@pytest.mark.parametrize(
    ("fault", "page", "named"),
    [
        (LOCK, "HANG: rank 0 waits at threads.py:31 flush", True),
        (LOCK, "HANG: rank 0 waits at threads.py:31\nflush (and so on)", True),
        (LOCK, "HANG:lock; place: forward, threads.py flush", True),
        (LOCK, "HANG: rank 0 waits at threads.py:31 flushed", False),
        (LOCK, "one\ntwo\nthree\nfour\nfive\nthreads.py:31 flush", False),
        (GLOO, "HANG: rank 1 waits", True),  # a rank is as good as a line
        (GLOO, "HANG: rank 0 waits", False),
    ],
)
def test_a_line_is_named_if_it_is_in_the_head_of_the_page(fault, page, named):
    assert selfcheck._line_named(chosen([fault])[0], page) == named


def test_an_error_of_the_supervisor_ends_the_check(monkeypatch):
    stop = threading.Event()

    def broken(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(selfcheck.runner, "run", broken)
    with pytest.raises(OSError, match="no space left"):
        selfcheck.check(chosen(["killed", "healthy"]), gpus=0, stop=stop)
    assert stop.is_set()


@pytest.mark.parametrize(
    "wrong", [{"rounds": 0}, {"workers": 0}, {"load": -1}, {"part": (0, 8)}, {"part": (9, 8)}]
)
def test_numbers_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="must be at least"):
        selfcheck.check((), gpus=0, **wrong)


def test_right_means_the_kind_and_where_it_is_known_the_sort():
    assert row(due="HANG:lock", found_what="lock").right
    assert row(due="HANG:lock", found_what="GIL").missed
    assert row(due="HANG:lock or STALLED", found="STALLED", found_what="timer").right
    assert row(due="PASS or SLOW", found="SLOW").right
    assert not skipped().right and not skipped().missed


def test_a_line_says_what_was_missed_and_why():
    assert str(row(seconds=7.25)) == "right    a lock: HANG in 7.2 s"
    missed = row(found="SLOW", due="HANG:lock", because=("it moves", "and is late"))
    assert str(missed).endswith("due was HANG:lock [a rule: it moves; and is late]")
    assert str(skipped()) == "skipped  device OOM: needs 1 GPU(s), here are 0"


def said(rows, monkeypatch, capsys):
    monkeypatch.setattr(selfcheck, "check", lambda *_, **__: rows)
    return cli.main(["trial", "selfcheck"]), capsys.readouterr().out


def test_the_command_ends_well_when_all_is_found(monkeypatch, capsys):
    code, out = said([row(), control(), skipped()], monkeypatch, capsys)
    assert code == 0 and "2 of 2 right" in out and "1 skipped" in out
    assert "of 1 healthy ones 0 were called HANG" in out


def test_the_command_fails_on_any_miss_and_names_it(monkeypatch, capsys):
    code, out = said([row(found="SLOW"), control(found="HANG")], monkeypatch, capsys)
    assert (
        code == 1
        and "MISSED   a lock: SLOW" in out
        and "of 1 healthy ones 1 were called HANG" in out
    )


@pytest.mark.processes
def test_the_command_writes_its_rows(monkeypatch, tmp_path):
    rows = [row(seconds=1.5), well(stalled=True)]

    def check(*_, say, **__):
        say(rows[0])
        assert read([tmp_path / "rows.json"]) == rows[:1]  # a sweep may be ended early
        return rows

    monkeypatch.setattr(selfcheck, "check", check)
    assert cli.main(["trial", "selfcheck", "--json", str(tmp_path / "rows.json")]) == 0
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["rows"][0] | {"found": "HANG", "right": True} == content["rows"][0]
    assert "torch" in content
    again = read([tmp_path / "rows.json"] * 2)
    assert again == rows * 2 and isinstance(again[0], Judged)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "gate x 1"], "the nearest is 'gate x 0'"),
        (["--json", "no/such/rows.json"], "its folder does not exist"),
        (["--rounds", "0"], "rounds=0"),
        (["--part", "3/2"], "part=3/2"),
        (["--group", "slow", "--only", "healthy"], "nothing is of group"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(arguments, words, capsys):
    assert cli.main(["trial", "selfcheck", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_the_command_lists_what_there_is_to_plant(capsys):
    assert cli.main(["trial", "selfcheck", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(every())


def test_the_text_has_a_column_for_each_kind_that_was_found():
    lines = command.text([row(), row(found="SLOW"), control()], 3.0).splitlines()
    assert lines[0].split() == ["planted", "PASS", "SLOW", "HANG"]
    assert lines[1].split() == ["HANG", "1", "1"]


# A hang and a control; notebook 07 plants ten, the test below all but programs.
FEW = ["lock_reentered", "healthy"]


@pytest.mark.processes
@pytest.mark.full
def test_a_few_faults_and_controls_end_to_end(tmp_path):
    rows = selfcheck.check(chosen(FEW), gpus=0, workers=2, folder=tmp_path)
    assert [str(r) for r in rows if not r.right] == []
    kept = [path.read_text(errors="replace") for path in tmp_path.rglob("evidence.json")]
    assert len(kept) == len(FEW)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whatever_is_planted_on_a_machine_without_a_gpu_is_named(tmp_path):
    every_one = chosen(groups=["planted", "slow", "fails"])
    rows = selfcheck.check(every_one, gpus=0, folder=tmp_path)
    assert sum(not r.skipped for r in rows) >= 40
    assert not [r.name for r in rows if r.control and r.ever("HANG")]
    if missed := [r.name for r in rows if r.missed]:  # a busy machine may hide that steps grow
        rows = selfcheck.check(chosen(missed), gpus=0, folder=tmp_path / "again")
        assert [str(r) for r in rows if r.missed] == []
