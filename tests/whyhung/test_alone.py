"""The commands in an interpreter that has neither torch, numpy nor the library."""

import json
import subprocess
import sys

import pytest
from places import ROOT

# None in sys.modules: to import it fails, as where it is not installed.
ALONE = (
    "import sys; sys.modules.update(dict.fromkeys(('torch', 'nsa', 'numpy'))); "
    "from whyhung.cli import main; sys.exit(main(sys.argv[1:]))"
)
STUCK = """\
import threading
lock = threading.Lock()
def twice():
    lock.acquire()
    lock.acquire()
twice()
"""


def whyhung(*words, cwd):
    command = [sys.executable, "-c", ALONE, *words]
    options = {"capture_output": True, "text": True, "cwd": cwd, "timeout": 300}
    return subprocess.run(
        command, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, **options
    )


@pytest.mark.processes
def test_a_shell_script_runs_as_without_us(tmp_path):
    done = whyhung("watch", "--folder", "seen", "--", "sh", "-c", "echo hi; exit 3", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (3, "hi\n", "")


@pytest.mark.full
@pytest.mark.processes
def test_a_plain_program_is_told_hung_at_its_line_and_explained_afterwards(tmp_path):
    (tmp_path / "program.py").write_text(STUCK)
    options = ["--folder", "seen", "--on-hang", "kill", "--stall-s", "2"]
    done = whyhung("watch", *options, "--", sys.executable, "program.py", cwd=tmp_path)
    verdict = json.loads((tmp_path / "seen" / "verdict.json").read_text())
    assert done.returncode != 0 and "whyhung watch: HANG" in done.stderr, done.stderr
    assert verdict["kind"] == "HANG" and "program.py:5 twice" in verdict["line"]
    told = whyhung("explain", "seen", cwd=tmp_path)
    assert told.returncode == 1 and "program.py:5 twice" in told.stdout, told.stderr


@pytest.mark.processes
def test_what_holds_no_evidence_is_an_error(tmp_path):
    done = whyhung("explain", "nowhere", cwd=tmp_path)
    assert done.returncode == 2 and "nowhere/evidence.json holds no evidence" in done.stderr
