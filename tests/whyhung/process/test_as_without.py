"""A watched program is as it would be without: its output to the byte, its end, all it can see."""

import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from places import SUPPORT
from processes import environment_with_package, wait_until_there

from whyhung.watch import inside

pytestmark = pytest.mark.processes
WATCH = [sys.executable, "-m", "whyhung", "watch", "--folder", "seen", "--"]
COMMANDS = "where\nnext\np number\nc\n"  # of somebody who debugs


def both(folder, command, **options):
    """A command's outcome, unwatched and watched."""
    options = {"cwd": folder, "env": environment_with_package(), "capture_output": True} | options
    return [
        subprocess.run([*before, *command], timeout=120, check=False, **options)
        for before in ([], WATCH)
    ]


def bare(output):
    """Without what differs from process to process."""
    return re.sub(rb"0x[0-9a-f]+|pid=\d+", b"-", output)


@pytest.mark.full
def test_a_program_that_tells_all_of_itself_tells_the_same(tmp_path):
    # One thread: those of OpenBLAS would take a signal for which the main thread waits.
    given = {"LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    options = {"input": COMMANDS.encode(), "env": environment_with_package() | given}
    command = [sys.executable, "-u", os.path.join(SUPPORT, "ordinary.py"), "a word"]
    plain, watched = both(tmp_path, command, **options)
    assert plain.returncode == watched.returncode == 1
    assert bare(watched.stdout).splitlines() == bare(plain.stdout).splitlines()
    assert bare(watched.stderr).splitlines() == bare(plain.stderr).splitlines()
    for part in (b"8 of 8|", b"ValueError: five rows", b"most recent call first"):
        assert part in plain.stderr
    for part in (b"(Pdb) 1\n", b"status: 3\n", b"started: 4\n", b"got: 12\n"):
        assert part in plain.stdout


def test_a_fault_of_a_program_and_its_own_signal_end_it_as_ever(tmp_path):
    fault = "import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)"
    plain, watched = both(tmp_path, [sys.executable, "-c", fault])
    assert plain.returncode == watched.returncode == -signal.SIGSEGV
    assert bare(plain.stderr) == bare(watched.stderr) and b"Segmentation fault" in plain.stderr
    own = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    plain, watched = both(tmp_path, [sys.executable, "-c", own])
    assert plain.returncode == watched.returncode == -signal.SIGTERM
    assert plain.stderr == watched.stderr == b""


@pytest.mark.parametrize("how", ["fails", "is interrupted"])
def test_torchs_import_has_the_traceback_that_it_would_have(tmp_path, how):
    does = "import nowhere" if how == "fails" else "import time\nopen('there', 'w')\ntime.sleep(60)"
    (tmp_path / "torch.py").write_text(f"{does}\n")
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    told = []
    for environment in (base, inside.environment(tmp_path, base)):
        command = [os.path.realpath(sys.executable), "-c", "import torch"]
        with subprocess.Popen(
            command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE
        ) as process:
            if how != "fails":
                wait_until_there(tmp_path / "there", process)
                process.send_signal(signal.SIGINT)
            told.append((process.communicate(timeout=60)[1], process.returncode))
        (tmp_path / "there").unlink(missing_ok=True)
    assert told[0] == told[1] and b"torch.py" in told[0][0]


def test_what_a_handler_raises_while_counting_begins_is_the_programs(tmp_path):
    """An exception like torchrun's SignalException, which derives from Exception."""
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "script.py").write_text(
        "import signal\n"
        "class Stop(Exception): pass\n"
        "def stop(*_): raise Stop\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "try:\n    import torch\n"
        "except Stop:\n    print('stopped')\n"
        "else:\n    print('lost')\n"
    )
    # What begins to count imports whyhung.watch.inside: this one takes its time for that.
    for package in ("whyhung", "whyhung/watch"):
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "whyhung/watch/inside.py").write_text(
        "import time\nopen('there', 'w')\ntime.sleep(60)\n"
    )
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    command = [os.path.realpath(sys.executable), "script.py"]
    environment = inside.environment(tmp_path, base)
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE
    ) as process:
        wait_until_there(tmp_path / "there", process)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == b"stopped\n"


COUNTS = """
import os, signal, time
got = []
for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: got.append(number))
open("there", "w").close()
end = time.monotonic() + 60
while len(got) < 3 and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.5)
print([int(number) for number in got])
"""


@pytest.mark.full
def test_a_signal_comes_once_whether_for_the_group_or_for_the_watcher(tmp_path):
    for send in (os.kill, os.killpg):
        with subprocess.Popen(
            [*WATCH, sys.executable, "-c", COUNTS], cwd=tmp_path, stdout=subprocess.PIPE,
            env=environment_with_package(), start_new_session=True,
        ) as process:  # fmt: skip
            wait_until_there(tmp_path / "there", process)
            for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
                send(process.pid, number)
                time.sleep(0.5)
            assert process.communicate(timeout=60)[0] == b"[10, 2, 15]\n"
        (tmp_path / "there").unlink()


SAYS = """
import sys
from pathlib import Path
from whyhung.process.reports import Reports
reports = Reports(Path("seen"))
sys.stderr.write("\\r 50%|#####     |")
sys.stderr.flush()
reports.status("12 s")
reports.say("HANG: here")
reports.say("the page")
"""


def test_a_message_begins_a_line_of_its_own_and_a_title_stays(tmp_path):
    environment = environment_with_package()
    command = [sys.executable, "-c", SAYS]
    mine, its = pty.openpty()
    options = {"env": environment, "cwd": tmp_path, "stderr": its, "check": True}
    subprocess.run(command, stdout=its, **options)
    drawn = os.read(mine, 10_000)
    assert (
        b"|\r\nwhyhung watch: HANG: here\r\n" in drawn
        and b"\x1b]" not in drawn
        and b"12" not in drawn
    )
    subprocess.run(command, stdout=subprocess.DEVNULL, **options)
    assert b"\x1b[Kwhyhung watch 12 s\r\x1b[Kwhyhung watch: HANG: here\r\n" in os.read(mine, 10_000)
    with open(tmp_path / "log", "w") as log:
        subprocess.run(command, **options | {"stderr": log})
    assert (
        (tmp_path / "log")
        .read_text()
        .endswith("|\nwhyhung watch: HANG: here\nwhyhung watch: the page\n")
    )
    os.close(mine)
    os.close(its)
