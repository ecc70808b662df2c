"""The lab's check of itself: blind, complete, and loud about a miss."""

import json
import threading
import time

import pytest
from judged_rows import control, row, skipped

from nsa.cli import main as cli
from nsa.cli import selfcheck as command
from nsa.experiments.selfcheck import trials as selfcheck
from nsa.experiments.selfcheck.faults.registry import FAULTS, chosen
from nsa.experiments.selfcheck.judged import blind, line, matrix
from nsa.lab.verdict import Verdict, judge
from nsa.lab.watch.evidence import End, Evidence, Look, P, Sample


def telling(fault):
    """Evidence that names the fault wherever evidence can."""
    module, _, name = fault.subject.partition(":")
    file = f"/some/where/{module.replace('.', '/')}.py"
    thread = {"name": "MainThread", "main": True, "active": True, "gil": True,
              "frames": [f"{file}:12 fetch", f"{name}.step"]}  # fmt: skip
    trace = f'Traceback:\n  File "{file}", line 3, in step\nRuntimeError: {name} in {module}'
    evidence = Evidence(
        spec={"subject": fault.subject, "settings": fault.settings | {"name": name}, "steps": 6},
        samples=[Sample(0.5, 0, P(0, "data", phases=1), beats=3, cpu_s=0.1, state="S")],
        looks=[Look(1.0, 0, "py-spy", [thread])],
        end=End("exception", 1, "RuntimeError", f"{fault.subject} failed", trace),
        notes=[f"made by {fault.subject}"],
        losses=[1.0],
    )
    evidence.again = Evidence.from_dict(evidence.to_dict())
    return evidence


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_judge_never_sees_what_was_planted(fault):
    module, _, name = fault.subject.partition(":")
    seen = json.dumps(blind(telling(fault), fault).to_dict())
    for word in (fault.subject, module, name, "faults", "settings"):
        assert word not in seen


def test_the_blind_evidence_is_otherwise_the_same():
    (fault,) = chosen(["missing shard"])
    before, after = telling(fault), blind(telling(fault), fault)
    assert after.samples == before.samples and after.losses == before.losses
    assert after.spec == {"steps": 6}
    assert after.end.type == "RuntimeError"
    assert after.again.spec == {"steps": 6}
    assert judge(after).kind == judge(before).kind == "CRASH"


def test_a_trial_asks_for_the_same_oracles_whatever_is_planted():
    assert len({selfcheck.spec(fault).oracles for fault in FAULTS}) == 1


class Supervisor:
    """A runner that runs nothing and keeps in which folders it was asked to, and how many at once.

    Every verdict is PASS.
    """

    def __init__(self, monkeypatch, seconds=0.0):
        self.folders, self.at_once, self.most, self.seconds = [], 0, 0, seconds
        self._lock = threading.Lock()
        monkeypatch.setattr(selfcheck.runner, "run", self.run)
        monkeypatch.setattr(selfcheck, "judge", self.judge)

    def run(self, spec, *, folder, **options):
        with self._lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            self.folders.append(folder)
        time.sleep(self.seconds)
        with self._lock:
            self.at_once -= 1
        folder.mkdir(parents=True)
        return Evidence(spec=spec.to_dict())

    def judge(self, evidence):
        assert "subject" not in evidence.spec
        return Verdict("PASS")


def test_rows_come_in_the_registrys_order_for_each_round(monkeypatch):
    Supervisor(monkeypatch)
    rows = selfcheck.check(chosen(["healthy", "killed", "device OOM"]), rounds=2, gpus=0)
    assert [(r.name, r.round, r.found) for r in rows] == [
        ("killed", 1, "PASS"), ("device OOM", 1, "not run"), ("healthy", 1, "PASS"),
        ("killed", 2, "PASS"), ("device OOM", 2, "not run"), ("healthy", 2, "PASS"),
    ]  # fmt: skip
    assert [r.missed for r in rows[:3]] == [True, False, False]
    assert rows[1].skipped == "needs 1 GPU(s), here are 0"


def test_what_computes_runs_one_at_a_time_beside_what_waits(monkeypatch):
    supervisor = Supervisor(monkeypatch, seconds=0.1)
    busy = [fault for fault in FAULTS if fault.busy and not fault.needs]
    selfcheck.check(busy, gpus=0, workers=4)
    assert supervisor.most == 1
    waiting = [fault for fault in FAULTS if not fault.busy and not fault.needs][:8]
    selfcheck.check([*busy[:2], *waiting], gpus=0, workers=3)
    assert supervisor.most == 4


def test_a_trials_folder_does_not_name_what_is_planted(monkeypatch):
    supervisor = Supervisor(monkeypatch)
    selfcheck.check(chosen(["killed"]), gpus=0)
    (folder,) = supervisor.folders
    assert (folder.parent.name, folder.name) == ("round-1", "00")


def test_an_error_of_the_supervisor_ends_the_check(monkeypatch):
    stop = threading.Event()

    def broken(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(selfcheck.runner, "run", broken)
    with pytest.raises(OSError, match="no space left"):
        selfcheck.check(chosen(["killed", "healthy"]), gpus=0, stop=stop)
    assert stop.is_set()


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"workers": 0}])
def test_no_rounds_and_no_workers_are_refused(wrong):
    with pytest.raises(ValueError, match="must be at least 1"):
        selfcheck.check((), gpus=0, **wrong)


def test_right_means_the_kind_and_where_it_is_known_the_sort():
    assert row(found="HANG", what="blocked", found_what="blocked").right
    assert row(found="HANG", what="blocked", found_what="gil-held").missed
    assert row(expected=("PASS", "SLOW"), found="SLOW").right
    assert not skipped().right and not skipped().missed


def test_the_matrix_counts_what_was_run_with_controls_apart():
    rows = [row(), row(found="SLOW"), control(), control(found="FAIL"), skipped()]
    assert matrix(rows) == {"HANG": {"HANG": 1, "SLOW": 1}, "control PASS": {"PASS": 1, "FAIL": 1}}


def test_a_line_says_what_was_missed_and_why():
    assert line(row(seconds=7.25)) == "right    a lock: HANG in 7.2 s"
    missed = row(found="SLOW", what="blocked", because=("it moves", "and is late"))
    assert line(missed).endswith("planted was HANG:blocked [a rule: it moves; and is late]")
    assert line(skipped()) == "skipped  device OOM: needs 1 GPU(s), here are 0"


def said(rows, monkeypatch, capsys):
    monkeypatch.setattr(selfcheck, "check", lambda *_, **__: rows)
    return cli.main(["selfcheck"]), capsys.readouterr().out


def test_the_command_ends_well_when_all_is_found(monkeypatch, capsys):
    code, out = said([row(), control(), skipped()], monkeypatch, capsys)
    assert code == 0 and "2 of 2 right" in out and "1 skipped" in out
    assert "controls called HANG: 0" in out


def test_the_command_fails_on_any_miss_and_names_it(monkeypatch, capsys):
    code, out = said([row(found="SLOW"), control(found="HANG")], monkeypatch, capsys)
    assert code == 1 and "MISSED   a lock: SLOW" in out and "controls called HANG: 1" in out


@pytest.mark.processes
def test_the_command_writes_its_rows(monkeypatch, tmp_path):
    rows = [row(seconds=1.5, track=((0.5, 0.0),))]
    monkeypatch.setattr(selfcheck, "check", lambda *_, **__: rows)
    assert cli.main(["selfcheck", "--json", str(tmp_path / "rows.json")]) == 0
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["rows"][0] | {"found": "HANG", "right": True} == content["rows"][0]
    assert "torch" in content


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "gate x 1"], "the nearest is 'gate x 0'"),
        (["--json", "no/such/rows.json"], "its folder does not exist"),
        (["--rounds", "0"], "rounds=0"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(arguments, words, capsys):
    assert cli.main(["selfcheck", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_the_command_lists_what_there_is_to_plant(capsys):
    assert cli.main(["selfcheck", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(FAULTS)


def test_the_text_has_a_column_for_each_kind_that_was_found():
    lines = command.text([row(), row(found="SLOW"), control()], 3.0).splitlines()
    assert lines[0].split() == ["planted", "PASS", "SLOW", "HANG"]
    assert lines[1].split() == ["HANG", "1", "1"]


FEW = ["gate x 0", "missing shard", "stop signal", "lock taken twice", "healthy", "frozen part"]


@pytest.mark.processes
@pytest.mark.full
def test_a_few_faults_and_controls_end_to_end(tmp_path):
    rows = selfcheck.check(chosen(FEW), gpus=0, workers=3, folder=tmp_path)
    assert [line(r) for r in rows if not r.right] == []
    kept = [path.read_text(errors="replace") for path in tmp_path.rglob("evidence.json")]
    assert len(kept) == len(FEW)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_fault_that_a_machine_without_a_gpu_can_hold_is_named(tmp_path):
    rows = selfcheck.check(gpus=0, folder=tmp_path)
    assert [line(r) for r in rows if r.missed] == []
    assert not [r.name for r in rows if r.control and r.found == "HANG"]
