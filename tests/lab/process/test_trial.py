"""Every way a trial can end, planted; and nobody is left behind."""

import os
import threading
import time

import pytest
from processes import python, wait_until_gone

from nsa.lab.process import trial
from nsa.lab.process.child import is_out_of_memory
from nsa.lab.process.procfs import kernel_kills
from nsa.lab.process.trial import Stopped, run_child


def run(name, spec=None, deadline_s=60, **options):
    return run_child(f"trial_entries:{name}", spec or {}, deadline_s=deadline_s, **options)


@pytest.mark.processes
def test_a_result_comes_back_from_a_process_in_a_session_of_its_own(tmp_path):
    outcome = run("echo", {"tokens": [1, 2.5, None, "é"]}, folder=tmp_path)
    assert (outcome.status, outcome.message, outcome.returncode) == ("ok", "", 0)
    assert outcome.result["spec"] == {"tokens": [1, 2.5, None, "é"]}
    assert outcome.result["parent"] == os.getpid()
    assert outcome.result["session"] == outcome.result["pid"] != os.getpid()
    assert 0 < outcome.seconds < 60
    assert (tmp_path / "stdout.txt").read_text() == "on stdout\n"
    assert {file.name for file in tmp_path.iterdir()} == {
        "spec.json", "result.json", "stdout.txt", "stderr.txt"
    }  # fmt: skip


@pytest.mark.processes
def test_an_old_result_in_the_folder_is_not_taken_for_a_new_one(tmp_path):
    (tmp_path / "result.json").write_text('{"status": "ok", "result": {"old": true}}')
    assert run("leave_early", {"code": 0}, folder=tmp_path).status == "error"


@pytest.mark.processes
def test_a_folder_that_a_trial_still_writes_to_is_refused_to_another(tmp_path):
    def meanwhile(pid):
        with pytest.raises(ValueError, match="another trial's, which still runs"):
            run("echo", folder=tmp_path / ".")
        return ""

    assert run("echo", folder=tmp_path, watch=meanwhile).status == "ok"
    assert run("echo", folder=tmp_path).status == "ok"


@pytest.mark.processes
def test_env_reaches_the_child_and_not_this_process():
    outcome = run("environment", {"name": "NSA_PLANTED"}, env={"NSA_PLANTED": "yes"})
    assert outcome.result == {"value": "yes"}
    assert "NSA_PLANTED" not in os.environ


@pytest.mark.processes
@pytest.mark.parametrize("name", ["torch_allocation", "address_space", "wrapped_out_of_memory"])
def test_running_out_of_memory_is_oom(name):
    outcome = run(name)
    assert (outcome.status, outcome.result, outcome.returncode) == ("oom", None, 1)
    assert outcome.message and "Traceback" in outcome.evidence


@pytest.mark.processes
def test_a_kill_is_oom_only_if_the_kernel_counted_one(monkeypatch):
    outcome = run("kill_itself")
    assert (outcome.status, outcome.message, outcome.returncode) == (
        "crash", "ended by SIGKILL", -9
    )  # fmt: skip
    counts = iter([4, 5])
    monkeypatch.setattr(trial, "kernel_kills", lambda: next(counts))
    outcome = run("kill_itself")
    assert outcome.status == "oom" and "killed by the kernel" in outcome.message


@pytest.mark.processes
def test_a_deadline_gives_timeout_and_the_stack_it_stood_in():
    outcome = run("sleep", deadline_s=1.5)
    assert outcome.status == "timeout" and "1.5 s" in outcome.message
    assert "in sleep" in outcome.evidence and "trial_entries.py" in outcome.evidence
    assert "hang" not in outcome.message


@pytest.mark.processes
@pytest.mark.full
def test_a_timeout_leaves_nobody_behind_not_even_who_ignores_sigterm(tmp_path):
    outcome = run("lasting_grandchild", {"pids": str(tmp_path / "pids")}, deadline_s=1.5)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and outcome.status == "timeout"
    assert wait_until_gone(pids) == []


@pytest.mark.processes
def test_a_timeout_finds_who_dropped_the_environment(tmp_path):
    spec = {"pids": str(tmp_path / "pids"), "environment": {}}
    assert run("sleeping_grandchild", spec, deadline_s=1.5).status == "timeout"
    assert wait_until_gone([int((tmp_path / "pids").read_text())]) == []


@pytest.mark.processes
def test_a_trial_that_returns_leaves_nobody_behind(tmp_path):
    outcome = run("lasting_grandchild", {"pids": str(tmp_path / "pids"), "seconds": 0})
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and outcome.status == "ok"
    assert wait_until_gone(pids) == []


@pytest.mark.processes
def test_a_trial_does_not_outlive_its_parent(tmp_path):
    pids = tmp_path / "pids"
    code = f"import trial_entries; trial_entries.a_parent_that_dies({{'pids': {str(pids)!r}}})"
    assert python(code).wait() == -9
    assert wait_until_gone([int(pids.read_text())]) == []


@pytest.mark.processes
@pytest.mark.full
def test_a_trial_inside_a_trial_ends_with_the_outer_one(tmp_path):
    inner = {"entry": "trial_entries:lasting_grandchild", "pids": str(tmp_path / "pids")}
    assert run("a_trial_of_its_own", inner, deadline_s=2).status == "timeout"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and wait_until_gone(pids) == []


@pytest.mark.processes
def test_a_segfault_is_a_crash_with_its_stack():
    outcome = run("segfault")
    assert (outcome.status, outcome.message, outcome.returncode) == (
        "crash", "ended by SIGSEGV", -11
    )  # fmt: skip
    assert "in segfault" in outcome.evidence


@pytest.mark.processes
def test_an_exception_is_an_error_with_type_message_note_and_traceback():
    outcome = run("value_error")
    assert (outcome.status, outcome.returncode) == ("error", 1)
    assert outcome.message == "ValueError: seven is not a colour; in step 3"
    assert "in value_error" in outcome.evidence


@pytest.mark.processes
@pytest.mark.parametrize("code", [0, 3])
def test_leaving_without_a_result_is_an_error(code):
    outcome = run("leave_early", {"code": code})
    assert outcome.status == "error" and outcome.message.startswith(f"exited with {code} before")


@pytest.mark.processes
def test_a_result_that_is_no_json_is_an_error():
    outcome = run("no_json")
    assert outcome.status == "error" and "returned what JSON cannot hold" in outcome.message


@pytest.mark.processes
def test_stop_ends_a_trial():
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    started = time.monotonic()
    with pytest.raises(Stopped, match="sleep"):
        run("sleep", stop=stop)
    assert time.monotonic() - started < 10


@pytest.mark.processes
@pytest.mark.parametrize(
    ("entry", "spec", "deadline_s", "message"),
    [
        ("trial_entries", {}, 1, "package.module:function"),
        ("trial_entries:", {}, 1, "package.module:function"),
        ("__main__:f", {}, 1, "put the function into a module"),
        ("no_such_module_:f", {}, 1, "no module no_such_module_"),
        ("trial_entries:no_such", {}, 60, "trial_entries has no 'no_such'"),
        ("trial_entries:echo", {"a": {1}}, 1, "must fit JSON"),
        ("trial_entries:echo", {}, 0, "deadline_s=0"),
    ],
)
def test_a_bad_trial_is_refused(entry, spec, deadline_s, message):
    with pytest.raises(ValueError, match=message):
        run_child(entry, spec, deadline_s=deadline_s)


def test_an_ordinary_error_is_not_out_of_memory():
    assert not is_out_of_memory(RuntimeError("out of order"))
    assert not is_out_of_memory(ValueError("the manual says 'out of memory'"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(OSError(12, "Cannot allocate memory"))


@pytest.mark.parametrize(
    ("membership", "file"),
    [
        ("0::/box\n", "box/memory.events"),
        ("0::/seen/from/outside\n", "memory.events"),
        ("5:cpu:/\n4:memory:/box\n0::/\n", "memory/box/memory.oom_control"),
    ],
)
def test_kills_are_read_from_both_kinds_of_control_group(tmp_path, membership, file):
    (tmp_path / "membership").write_text(membership)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("under_oom 0\noom_kill 7\n")
    assert kernel_kills(tmp_path, tmp_path / "membership") == 7
    assert kernel_kills(tmp_path, tmp_path / "missing") is None
