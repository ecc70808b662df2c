"""A fork of the warm server is, to whoever looks, the process that its command would have been."""

import json
import os
import signal
import subprocess
import sys

import pytest
from processes import environment_with_package, wait_until_there
from warm_children import WARM

from whyhung.process import family, ranks
from whyhung.process.trial import run_child

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not WARM.installed, reason="with a GPU all starts are real"),
]
CHILD = [sys.executable, "-m", "whyhung.process.child"]


def served(start):
    """Result of `start` where the server makes the process, and where it is executed."""
    before = WARM.served
    warm = start()
    assert WARM.served == before + 1
    with WARM.real():
        return warm, start()


def without_cookie(told):
    """Cookies are new for each trial."""
    told["environ"][family.COOKIE] = "a cookie"
    kept = [line for line in told["proc environ"] if not line.startswith(family.COOKIE)]
    return told | {"proc environ": kept}


def test_a_trial_is_told_nothing_else_than_one_that_is_executed(tmp_path):
    def start():
        folder, env = tmp_path / "kept", {"NSA_PLANTED": "é ="}
        outcome = run_child("told_start:told", {"a": 1}, deadline_s=100, folder=folder, env=env)
        assert outcome.status == "ok", outcome.evidence
        return without_cookie(outcome.result)

    warm, executed = served(start)
    assert warm == executed and warm["environ"]["NSA_PLANTED"] == "é ="
    assert warm["parent"] == os.getpid() and warm["leads"] == [True, True]


def test_of_a_command_too(tmp_path):
    """In its starter's session, in another folder, with pipes, and as its caller decodes them."""
    (tmp_path / "spec.json").write_text("{}")
    command = [*CHILD, "told_start:told", tmp_path / "spec.json", tmp_path / "out.json"]
    command[1:1] = ["-u", "-X", "faulthandler"]

    def start():
        options = {"cwd": tmp_path, "env": environment_with_package(), "text": True}
        done = subprocess.run(command, input="", capture_output=True, timeout=100, **options)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        told = json.loads((tmp_path / "out.json").read_text())["result"]
        told["streams"] = [name.partition(":")[0] for name in told["streams"]]
        return told

    warm, executed = served(start)
    assert warm == executed and warm["leads"] == [False, False]


@pytest.mark.parametrize(
    ("name", "spec", "code"), [("segfault", {}, -11), ("leave_early", {"code": 3}, 3)]
)
def test_it_ends_as_one_that_is_executed(name, spec, code):
    ends = served(lambda: run_child(f"trial_entries:{name}", spec, deadline_s=100))
    assert [end.returncode for end in ends] == [code, code]
    assert ends[0].message == ends[1].message
    assert ends[0].status == ends[1].status


def test_what_it_raises_is_printed_with_the_same_last_line():
    def start():
        command = [sys.executable, "-m", "whyhung.process.family", "no_such_module"]
        return subprocess.run(command, capture_output=True, text=True, timeout=100)

    warm, executed = served(start)
    assert warm.returncode == executed.returncode == 1
    assert warm.stderr.splitlines()[-1] == executed.stderr.splitlines()[-1] != ""


def test_ctrl_c_ends_it(tmp_path):
    spec, out, there = (tmp_path / name for name in ("spec.json", "out.json", "there"))
    spec.write_text(json.dumps({"there": str(there)}))
    before = WARM.served
    command = [*CHILD, "told_start:rest", spec, out]
    with subprocess.Popen(command, env=environment_with_package()) as child:
        wait_until_there(there, child)
        child.send_signal(signal.SIGINT)
    assert WARM.served == before + 1
    assert child.returncode == 1 and "KeyboardInterrupt" in out.read_text()


def test_it_leads_its_session_once_its_popen_is_there():
    """jupyter_client asks at once whose group a kernel's is, and ends that whole group later."""
    command = [sys.executable, "-m", "whyhung.process.procfs"]
    with subprocess.Popen(command, start_new_session=True) as child:
        assert os.getpgid(child.pid) == os.getsid(child.pid) == child.pid


@pytest.mark.full
def test_torchrun_is_executed_by_a_fork_and_its_ranks_end_as_always(tmp_path):
    def rows():
        found = ranks.run_ranks(
            "told_start:told", {}, ranks=2, deadline_s=100, folder=tmp_path / "ranks"
        )
        return [(row["status"], without_cookie(row["result"])["cmdline"]) for row in found]

    before = WARM.served
    warm = rows()
    assert WARM.served == before + 1
    with WARM.real():
        assert rows() == warm


COLD = {
    "another interpreter": ["/bin/true", "-m", "whyhung.process.child"],
    "code": [sys.executable, "-c", ""],
    "a script": [sys.executable, os.devnull],
    "isolated": [sys.executable, "-I", "-m", "whyhung.process.procfs"],
    "another package": [sys.executable, "-m", "this"],
}


@pytest.mark.parametrize("command", COLD.values(), ids=COLD)
def test_what_it_cannot_be_is_executed(command):
    before = WARM.served
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=True).returncode == 0
    assert WARM.served == before


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "TORCH_LOGS", "LD_BIND_NOW", "PYTHONPATH"])
def test_a_variable_that_is_read_before_main_is_executed(name, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("")
    environment = os.environ | {name: "1" if name != "PYTHONPATH" else str(tmp_path)}
    before = WARM.served
    command = [sys.executable, "-m", "whyhung.process.procfs"]
    assert subprocess.run(command, env=environment, check=True).returncode == 0
    assert WARM.served == before
    assert subprocess.run(command, check=True).returncode == 0
    assert WARM.served == before + 1
