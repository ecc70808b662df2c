"""Every way a notebook can end, and that the saved notebook says so."""

import asyncio
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import nbformat
import papermill
import psutil
import pytest
from jupyter_client.kernelspec import KernelSpec
from papermill.exceptions import PapermillExecutionError
from processes import python, wait_until_there
from sample_notebooks import (
    code_cells,
    errors_of,
    marked_sleepers,
    sleeper,
    statuses,
    text_of,
    write_notebook,
)
from warm_children import SERVED

from workbook.runs import engine, kernel

# a second lock of a plain mutex waits for ever inside libc; PyDLL keeps the GIL meanwhile, so the
# kernel can neither answer nor be interrupted
GIL_HANG = """\
import ctypes
print('going in', flush=True)
lib, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
import time; time.sleep(0.5)
lib.pthread_mutex_lock(mutex); lib.pthread_mutex_lock(mutex)"""
HANG = "import time\nprint('going in')\ntime.sleep(600)"
KILL = """\
import os, time
print('last words', flush=True)
time.sleep(0.5)
os.kill(os.getpid(), 9)"""

pytestmark = pytest.mark.processes


def execute(tmp_path, *cells, parameters=None, **options) -> Path:
    """Run the cells with the engine; the error papermill raises for a failed one is expected."""
    notebook = write_notebook(tmp_path / "in.ipynb", *cells, parameters=parameters)
    output = tmp_path / "out.ipynb"
    options |= {"engine_name": engine.register(), "kernel_name": "python3", "language": "python"}
    with (tmp_path / "kernel.log").open("w") as log:
        try:
            papermill.execute_notebook(
                str(notebook), str(output), progress_bar=False, kernel_log=log, **options
            )
        except PapermillExecutionError:
            assert reason(output) != "ok"
        else:
            assert reason(output) == "ok"
    return output


def reason(path: Path) -> str:
    return nbformat.read(path, as_version=4).metadata.papermill.stop_reason


def assert_nothing_left(mark: str) -> None:
    assert marked_sleepers(mark) == []
    own = set(psutil.Process().children(recursive=True))
    assert not own & set(marked_sleepers(kernel.START)), "a kernel is left"


@pytest.fixture
def mark():
    """A word in the command line of what a notebook starts; whatever is left is ended after."""
    word = f"mark-{uuid.uuid4().hex}"
    yield word
    for process in marked_sleepers(word):
        process.kill()


def test_a_good_notebook_completes_and_ends_what_it_started(tmp_path, mark):
    dropped = (  # a child without the environment of its parent
        "import subprocess, sys\n"
        f"line = [sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}]\n"
        "subprocess.Popen(line, env={}, start_new_session=True)\n"
        "print('dropped')"
    )
    out = execute(tmp_path, sleeper(mark), dropped, "print('two')")
    assert reason(out) == "ok"
    assert statuses(out) == ["completed"] * 3
    assert [text_of(cell) for cell in code_cells(out)] == ["started\n", "dropped\n", "two\n"]
    assert [cell.execution_count for cell in code_cells(out)] == [1, 2, 3]
    assert_nothing_left(mark)


def test_the_helper_that_looks_for_processes_sees_one(mark):
    code = "import time; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code, mark])
    try:
        assert [p.pid for p in marked_sleepers(mark)] == [process.pid]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("cell", "cell_timeout_s", "stop_reason", "printed", "enames", "message"),
    [
        pytest.param(
            *("print('before')\n1 / 0", None, "error", "before\n", ["ZeroDivisionError"]),
            "division by zero",
            id="an exception",
        ),
        pytest.param(
            *(KILL, 60, "kernel_died", "last words\n", ["DeadKernelError"]),
            "the kernel died of SIGKILL",
            id="a killed kernel",
        ),
        pytest.param(
            *(HANG, 2, "timeout", "going in\n", ["KeyboardInterrupt", "CellTimeoutError"]),
            "the cell ran longer than its 2 s",
            id="a hang",
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(GIL_HANG, 3, "timeout", "going in\n", ["CellTimeoutError"]),
            "the cell ran longer than its 3 s",
            id="a hang in C that holds the GIL",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_cell_that_does_not_end_well_says_how_and_leaves_the_later_ones_pending(
    tmp_path, mark, cell, cell_timeout_s, stop_reason, printed, enames, message
):
    out = execute(tmp_path, sleeper(mark), cell, "print('never')", cell_timeout_s=cell_timeout_s)
    assert reason(out) == stop_reason
    assert statuses(out) == ["completed", "failed", "pending"]
    failed, never = code_cells(out)[1:]
    assert text_of(failed) == printed and errors_of(failed) == enames
    assert failed.outputs[-1].evalue == message
    if "KeyboardInterrupt" in enames:  # shows where it was
        assert "sleep" in "".join(failed.outputs[1].traceback)
    assert never.outputs == [] and never.execution_count is None
    assert_nothing_left(mark)


@pytest.mark.full
def test_papermills_own_limit_of_a_cell_is_one_too(tmp_path):
    out = execute(tmp_path, "import time; time.sleep(12)", execution_timeout=2)
    assert reason(out) == "timeout"
    assert code_cells(out)[0].outputs[-1].evalue == "the cell ran longer than its 2 s"


@pytest.mark.parametrize(("returncode", "roots"), [(None, {41}), (0, set())])
def test_a_kernel_that_is_there_is_a_root_whatever_its_environment_says(
    monkeypatch, returncode, roots
):
    """One that was reaped is none: its number may be somebody else's."""
    given = []
    process = SimpleNamespace(pid=41, returncode=returncode)
    client = SimpleNamespace(cookie="cookie", _process=lambda: process, km=None, kc=None)
    monkeypatch.setattr(engine.family, "end_family", lambda *found: given.append(found) or set())
    asyncio.run(engine.TruthfulClient._end_kernel(client))
    assert given == [("cookie", roots)]


def test_what_breaks_outside_of_all_cells_is_an_error_too(tmp_path, monkeypatch):
    def broken(coroutine):
        coroutine.close()
        raise RuntimeError("outside")

    monkeypatch.setattr(engine, "_run", broken)
    with pytest.raises(RuntimeError, match="outside"):
        execute(tmp_path, "print('never')")
    assert reason(tmp_path / "out.ipynb") == "error"
    assert statuses(tmp_path / "out.ipynb") == ["pending"]


@pytest.mark.full
def test_the_whole_notebook_has_a_deadline_besides_that_of_a_cell(tmp_path, mark):
    cell = "import time; time.sleep(1.5)"
    out = execute(tmp_path, sleeper(mark), *[cell] * 6, timeout_s=4, cell_timeout_s=60)
    assert reason(out) == "timeout"
    states = statuses(out)
    assert states[0] == "completed" and states[-1] == "pending" and states.count("failed") == 1
    failed = code_cells(out)[states.index("failed")]
    assert failed.outputs[-1].evalue == "the notebook ran longer than its 4 s"
    assert_nothing_left(mark)


def test_a_deadline_before_the_kernel_is_ready_counts_too(tmp_path):
    out = execute(tmp_path, "print('never')", timeout_s=0.01)
    assert reason(out) == "timeout" and statuses(out) == ["failed"]
    assert code_cells(out)[0].execution_count is None


@pytest.mark.full
def test_a_kernel_that_does_not_start_fails_the_first_cell(tmp_path, monkeypatch):
    broken = KernelSpec(argv=[sys.executable, "-c", "raise SystemExit(3)"], language="python")
    monkeypatch.setattr(kernel.OwnInterpreter, "get_kernel_spec", lambda *_: broken)
    out = execute(tmp_path, "print('never')", "print('never')")
    assert reason(out) == "error" and statuses(out) == ["failed", "pending"]
    assert "the kernel did not start" in code_cells(out)[0].outputs[0].evalue


RUNNER = """\
{}import sys, papermill
from workbook.runs import engine
try:
    papermill.execute_notebook({!r}, {!r}, engine_name=engine.register(),
        kernel_name="python3", language="python", progress_bar=False)
except papermill.PapermillExecutionError as error:
    sys.exit(7)
"""


def start_runner(tmp_path, mark, cell):
    """A runner in a process of its own, once its notebook has entered `cell`."""
    ready = tmp_path / "ready"
    touch = f"open({str(ready)!r}, 'w').close()\n"
    files = tmp_path / "in.ipynb", tmp_path / "out.ipynb"
    write_notebook(files[0], sleeper(mark), touch + cell, "print('never')", parameters=None)
    runner = python(RUNNER.format(SERVED, *map(str, files)), stderr=subprocess.DEVNULL)
    wait_until_there(ready, runner)
    time.sleep(1.0)
    assert len(marked_sleepers(mark)) == 2
    return runner, files[1]


@pytest.mark.full
def test_a_stopped_runner_leaves_a_true_notebook_and_no_process(tmp_path, mark):
    """Stuck in C; Ctrl-C in Python is stopped in test_run.py."""
    runner, out = start_runner(tmp_path, mark, GIL_HANG)
    runner.terminate()
    assert runner.wait(timeout=30) == 7
    assert reason(out) == "terminated"
    assert statuses(out) == ["completed", "failed", "pending"]
    failed = code_cells(out)[1]
    assert text_of(failed) == "going in\n" and errors_of(failed) == ["Terminated"]
    assert_nothing_left(mark)


@pytest.mark.full
@pytest.mark.real_starts
def test_a_runner_killed_outright_takes_a_kernel_stuck_in_c_along(tmp_path, mark):
    runner, out = start_runner(tmp_path, mark, GIL_HANG)
    kernels = [p for p in psutil.Process(runner.pid).children() if kernel.START in p.cmdline()]
    assert len(kernels) == 1
    runner.kill()
    runner.wait()
    psutil.wait_procs(kernels, timeout=10)
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in kernels)
    # the autosave kept what was printed, and nothing claims to have completed
    assert statuses(out) == ["completed", "running", "pending"]


def test_it_runs_in_a_running_event_loop_and_in_a_thread_and_gives_the_signal_handlers_back(
    tmp_path,
):
    async def inside():
        return execute(tmp_path, "print('in')")

    before = [signal.getsignal(number) for number in engine.SIGNALS]
    assert statuses(asyncio.run(inside())) == ["completed"]
    assert [signal.getsignal(number) for number in engine.SIGNALS] == before
    with ThreadPoolExecutor(1) as elsewhere:  # which gets no signals
        assert statuses(elsewhere.submit(execute, tmp_path, "1").result()) == ["completed"]


def test_outputs_are_logged_as_they_arrive(tmp_path):
    times = []
    cell = "import time\nprint('a', flush=True)\ntime.sleep(1)\nprint('b', flush=True)"
    heard = {"on_output": lambda output: times.append((time.monotonic(), output.text))}
    with (tmp_path / "stdout.log").open("w") as log:
        execute(tmp_path, cell, stdout_file=log, **heard)
    assert (tmp_path / "stdout.log").read_text() == "a\nb\n"
    assert [text for _, text in times] == ["a\n", "b\n"]
    assert times[1][0] - times[0][0] > 0.5


def test_the_kernel_is_the_interpreter_that_runs_us_with_the_package_of_the_runner(tmp_path):
    import nsa

    cell = "import sys, nsa\nprint(sys.executable, nsa.__file__)"
    shadows = "print([p for p in sys.path if p.endswith('workbook/runs')])"
    found, shadowed = map(text_of, code_cells(execute(tmp_path, cell, shadows)))
    assert found.split() == [sys.executable, nsa.__file__]
    assert shadowed == "[]\n", "the names of the workbook's files shadow modules"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no abstract sockets")
def test_a_kernels_channels_have_names_of_its_own(tmp_path):
    listening = """\
from ipykernel.kernelapp import IPKernelApp
app = IPKernelApp.instance()
names = [line.split()[-1] for line in open('/proc/net/unix') if app.ip in line]
print(app.ip, len(set(names)))"""
    done = [execute(tmp_path / name, listening) for name in "ab"]
    seen = [text_of(code_cells(one)[0]).split() for one in done]
    assert [channels for _, channels in seen] == ["5", "5"]
    assert seen[0][0] != seen[1][0]
