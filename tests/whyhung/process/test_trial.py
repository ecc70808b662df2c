"""Every way a trial can end, planted; and nobody is left behind."""

import os
import threading
import time

import pytest
from processes import python, wait_until_gone

from whyhung.process import trial
from whyhung.process.trial import Stopped, run_child

pytestmark = pytest.mark.processes


def run(name, spec=None, deadline_s=60, **options):
    return run_child(f"trial_entries:{name}", spec or {}, deadline_s=deadline_s, **options)


@pytest.fixture
def pids(tmp_path):
    """The file in which an entry says who it is and whom it started."""
    return tmp_path / "pids"


def nobody_is_left(pids, count):
    found = [int(pid) for pid in pids.read_text().split()]
    return len(found) == count and wait_until_gone(found) == []


@pytest.mark.real_starts
def test_a_result_comes_back_from_a_process_in_a_session_of_its_own(tmp_path):
    outcome = run("echo", {"tokens": [1, 2.5, None, "é"]}, folder=tmp_path)
    assert (outcome.status, outcome.message, outcome.returncode) == ("ok", "", 0)
    assert outcome.result["spec"] == {"tokens": [1, 2.5, None, "é"]}
    assert outcome.result["parent"] == os.getpid()
    assert outcome.result["session"] == outcome.result["pid"] != os.getpid()
    assert 0 < outcome.seconds < 60
    assert (tmp_path / "stdout.txt").read_text() == "on stdout\n"
    names = {"spec.json", "result.json", "stdout.txt", "stderr.txt"}
    assert {file.name for file in tmp_path.iterdir()} == names


def test_an_old_result_in_the_folder_is_not_taken_for_a_new_one(tmp_path):
    (tmp_path / "result.json").write_text('{"status": "ok", "result": {"old": true}}')
    assert run("leave_early", {"code": 0}, folder=tmp_path).status == "error"


def test_a_folder_that_a_trial_still_writes_to_is_refused_to_another(tmp_path):
    def meanwhile(pid):
        with pytest.raises(ValueError, match="another trial's, which still runs"):
            run("echo", folder=tmp_path / ".")
        return ""

    assert run("echo", folder=tmp_path, watch=meanwhile).status == "ok"
    assert run("echo", folder=tmp_path).status == "ok"


def test_env_reaches_the_child_and_not_this_process():
    outcome = run("environment", {"name": "NSA_PLANTED"}, env={"NSA_PLANTED": "yes"})
    assert outcome.result == {"value": "yes"}
    assert "NSA_PLANTED" not in os.environ


@pytest.mark.parametrize("name", ["torch_allocation", "address_space", "wrapped_out_of_memory"])
def test_running_out_of_memory_is_oom(name):
    outcome = run(name)
    assert (outcome.status, outcome.result, outcome.returncode) == ("oom", None, 1)
    assert outcome.message and "Traceback" in outcome.evidence


@pytest.mark.real_starts  # of a crash, Python names each loaded module of C behind the stack
@pytest.mark.parametrize(
    ("name", "spec", "status", "returncode", "message", "evidence"),
    [
        ("kill_itself", {}, "crash", -9, "ended by SIGKILL", ""),
        ("segfault", {}, "crash", -11, "ended by SIGSEGV", "in segfault"),
        ("value_error", {}, "error", 1, "ValueError: seven is not a colour; in step 3",
         "in value_error"),
        ("leave_early", {"code": 0}, "error", 0, "exited with 0 before it had a result", ""),
        ("leave_early", {"code": 3}, "error", 3, "exited with 3 before it had a result", ""),
        ("no_json", {}, "error", 1, "trial_entries:no_json returned what JSON cannot hold: ",
         "Object of type set"),
    ],
)  # fmt: skip
def test_how_it_ended_is_told_with_what_it_left(name, spec, status, returncode, message, evidence):
    outcome = run(name, spec)
    assert (outcome.status, outcome.returncode) == (status, returncode)
    assert outcome.message.startswith(message) and evidence in outcome.evidence


@pytest.mark.parametrize(
    ("spec", "status"),
    [
        ({"seconds": 60}, "timeout"),
        ({"call": "kill_itself"}, "crash"),
        ({"call": "value_error"}, "error"),
        ({"call": "leave_early", "code": 0}, "error"),
    ],
)
def test_a_trial_that_does_not_return_leaves_what_it_has_stored(spec, status, tmp_path):
    outcome = run("half", spec, deadline_s=5 if "seconds" in spec else 60, folder=tmp_path)
    assert (outcome.status, outcome.result, outcome.so_far) == (status, None, {"measured": 2})
    assert run("sleep", {"seconds": 0}, folder=tmp_path).so_far is None
    assert not (tmp_path / "so_far.json").exists()


def test_a_trial_that_returns_has_its_result_alone(tmp_path):
    outcome = run("half", folder=tmp_path)
    assert (outcome.status, outcome.result, outcome.so_far) == ("ok", {"measured": 3}, None)
    assert not (tmp_path / "so_far.json").exists()


def test_a_kill_is_oom_if_the_kernel_counted_one(monkeypatch):
    counts = iter([4, 5])
    monkeypatch.setattr(trial, "kernel_kills", lambda: next(counts))
    outcome = run("kill_itself")
    assert outcome.status == "oom" and "killed by the kernel" in outcome.message


def test_a_deadline_gives_timeout_and_the_stack_it_stood_in():
    outcome = run("sleep", deadline_s=1.5)
    assert outcome.status == "timeout" and "1.5 s" in outcome.message
    assert "in sleep" in outcome.evidence and "trial_entries.py" in outcome.evidence
    assert "hang" not in outcome.message


@pytest.mark.full
def test_a_timeout_leaves_nobody_behind_not_even_who_ignores_sigterm(pids):
    outcome = run("lasting_grandchild", {"pids": str(pids)}, deadline_s=1.5)
    assert outcome.status == "timeout" and nobody_is_left(pids, 2)


def test_a_timeout_finds_who_dropped_the_environment(pids):
    spec = {"pids": str(pids), "environment": {}}
    assert run("sleeping_grandchild", spec, deadline_s=1.5).status == "timeout"
    assert nobody_is_left(pids, 1)


def test_a_trial_that_returns_leaves_nobody_behind(pids):
    outcome = run("lasting_grandchild", {"pids": str(pids), "seconds": 0})
    assert outcome.status == "ok" and nobody_is_left(pids, 2)


@pytest.mark.parametrize(
    ("entry", "count"),
    # in a session of its own, and without what it could have inherited
    [("sleep_and_tell", 1), ("lasting_grandchild", 2), ("sleeping_grandchild", 1)],
)
def test_no_trial_outlives_a_kill_of_its_supervisor(pids, entry, count):
    spec = {"entry": entry, "pids": str(pids), "environment": {}}
    code = f"import trial_entries; trial_entries.a_parent_that_dies({spec!r})"
    assert python(code).wait() == -9
    assert nobody_is_left(pids, count)


@pytest.mark.full
def test_a_trial_inside_a_trial_ends_with_the_outer_one(pids):
    inner = {"entry": "trial_entries:lasting_grandchild", "pids": str(pids)}
    assert run("a_trial_of_its_own", inner, deadline_s=2).status == "timeout"
    assert nobody_is_left(pids, 2)


def test_stop_ends_a_trial():
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    started = time.monotonic()
    with pytest.raises(Stopped, match="sleep"):
        run("sleep", stop=stop)
    assert time.monotonic() - started < 10


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
