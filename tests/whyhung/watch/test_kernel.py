"""One program whose threads each wait for something else, and one look at it."""

import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from processes import running, wait_until

from whyhung.process.family import COOKIE
from whyhung.watch import kernel, syscalls
from whyhung.watch.evidence import Evidence, P

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc"),
]
PROGRAM = r"""
import ctypes, fcntl, multiprocessing, os, select, signal, subprocess, sys, threading, time

libc = ctypes.CDLL(None)
gettid = libc.gettid
os.chdir(sys.argv[1])
read_end, write_end = os.pipe()
given, theirs = os.pipe()
open("mine", "w"), open("another", "w"), open("posix", "w")
holder = subprocess.Popen(
    [sys.executable, "-c", "import fcntl, sys; f = open('another'); fcntl.flock(f, 2); "
     "g = open('posix', 'w'); fcntl.lockf(g, 2); print(flush=True); sys.stdin.read()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[theirs],
)
holder.stdout.readline()
os.close(theirs)
os.mkfifo("fifo")
lock, semaphore = threading.Lock(), multiprocessing.Semaphore(0)
lock.acquire()
forked = os.fork()
if not forked:
    os.close(write_end)
    signal.pause()
mine = open("mine")
fcntl.flock(mine, fcntl.LOCK_EX)
full, full_end = os.pipe()
os.set_blocking(full_end, False)
try:
    while True:
        os.write(full_end, bytes(65536))
except BlockingIOError:
    os.set_blocking(full_end, True)
stopped = subprocess.Popen(["sleep", "600"])
stopped.send_signal(signal.SIGSTOP)
zombie = subprocess.Popen(["true"])

def poll():
    polled = select.poll()
    polled.register(read_end, select.POLLIN)
    polled.poll(600_000)

def epoll():
    polled = select.epoll()
    polled.register(given, select.EPOLLIN)
    polled.poll()

def joins():
    thread = ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, libc.sleep, ctypes.c_void_p(600))
    libc.pthread_join(thread, None)

def absolute():
    class Time(ctypes.Structure):
        _fields_ = [("s", ctypes.c_long), ("n", ctypes.c_long)]
    until = Time(int(time.monotonic()) + 600, 0)
    libc.clock_nanosleep(1, 1, ctypes.byref(until), None)

def relative():
    libc.sleep(600)

mutex = (ctypes.c_char * 64)()
owner = threading.Event()

def owns():
    libc.pthread_mutex_lock(mutex)
    owner.set()
    signal.sigwait({signal.SIGUSR2})

def mutexes():
    owner.wait()
    libc.pthread_mutex_lock(mutex)

waits = dict(
    pipe=lambda: os.read(read_end, 1), outsider=lambda: os.read(given, 1),
    stdin=lambda: os.read(0, 1), full=lambda: os.write(full_end, bytes(8192)),
    select=lambda: select.select([read_end], [], []), poll=poll, epoll=epoll,
    lock=lock.acquire, timed=lambda: lock.acquire(timeout=600), semaphore=semaphore.acquire,
    joins=joins, absolute=absolute, relative=relative, owns=owns, mutexes=mutexes,
    flock=lambda: fcntl.flock(open("another"), fcntl.LOCK_EX),
    posix=lambda: fcntl.lockf(open("posix", "w"), fcntl.LOCK_EX),
    own_flock=lambda: fcntl.flock(open("mine"), fcntl.LOCK_EX),
    fifo=lambda: open("fifo"), child=lambda: os.waitpid(holder.pid, 0),
    idle=lambda: select.select([], [], [], 600), progress=lambda: time.sleep(600),
)
numbers = {}
def begin(name, wait):
    numbers[name] = gettid()
    wait()

for name, wait in waits.items():
    threading.Thread(target=begin, args=(name, wait), daemon=True).start()
while len(numbers) < len(waits):
    time.sleep(0.01)
pids = dict(holder=holder.pid, forked=forked, stopped=stopped.pid, zombie=zombie.pid)
print(repr((numbers, pids)), flush=True)
os.waitpid(forked, 0)
"""


def end(process):
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream:
            stream.close()


@contextlib.contextmanager
def sleeper(**options):
    """A process that sleeps."""
    with running(subprocess.Popen(["sleep", "600"], **options)) as child:
        wait_until(lambda: "nanosleep" in kernel.procfs.process(child.pid).wchan)
        yield child


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The snapshot, the rank's pid, its threads by what they do, and the pids of its children."""
    folder = tmp_path_factory.mktemp("waits")
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, COOKIE: "/of-this-test"},
    )
    try:
        numbers, pids = ast.literal_eval(child.stdout.readline().decode())
        until = time.monotonic() + 60
        while time.monotonic() < until:
            snapshot = kernel.snapshot({0: child.pid}, "/of-this-test", 1.5, {0: P(3)})
            threads = {thread.tid: thread for thread in snapshot.of(0).threads}
            named = {name: threads[tid] for name, tid in numbers.items()}
            stopped = snapshot.process(pids["stopped"])
            asleep = all(thread.wait is not None for thread in threads.values())
            if asleep and stopped.state == "T" and "holds" in named["mutexes"].wait.text:
                break
            time.sleep(0.05)
        yield snapshot, child.pid, named, pids
    finally:
        end(child)


def test_the_family_has_its_names_its_ranks_and_its_numbers(seen):
    snapshot, pid, _, pids = seen
    family = {process.pid: process for process in snapshot.processes if process.of == 0}
    assert set(family) == {pid, *pids.values()}
    rank = family[pid]
    assert rank.rank == 0 and rank.name.startswith(os.path.basename(sys.executable) + " -c")
    assert family[pids["stopped"]].name == "sleep 600"
    assert family[pids["forked"]].name.endswith("(forked)")
    assert family[pids["zombie"]].state == "Z" and not family[pids["zombie"]].threads
    assert all(
        family[child].parent == pid and family[child].rank is None for child in pids.values()
    )
    assert rank.cpu_s > 0 and rank.io_bytes > 65536 and rank.rss_mib > 1 and not rank.message
    assert snapshot.p == {0: P(3)} and snapshot.t == 1.5
    assert Evidence.from_dict(Evidence(snapshots=[snapshot]).to_dict()).snapshots == [snapshot]


def test_every_wait_names_who_could_end_it(seen):
    snapshot, pid, threads, pids = seen
    own, forked, holder = (pid, 0), (pids["forked"], 0), (pids["holder"], 0)
    expected = {
        "pipe": ("pipe", {own}),
        "outsider": ("pipe", {holder}),
        "full": ("pipe", {own, holder, forked}),
        "select": ("pipe", {own}),
        "poll": ("pipe", {own}),
        "epoll": ("pipe", {holder}),
        "lock": ("lock", {own}),
        "timed": ("lock", {own}),
        "semaphore": ("semaphore", {own, forked}),
        "mutexes": ("lock", {(pid, threads["owns"].tid)}),
        "flock": ("file lock", {holder}),
        "posix": ("file lock", {holder}),
        "own_flock": ("file lock", {own}),
        "child": ("child", {holder}),
    }
    found = {name: (threads[name].wait.kind, set(threads[name].wait.wakers)) for name in expected}
    expected["full"] = ("pipe", {own})  # made after the fork
    assert found == expected
    assert not any(threads[name].wait.outside for name in expected)
    main = snapshot.of(0).main()
    assert main.wait.kind == "child" and main.wait.wakers == (forked,)
    assert main.wait.source == f"/proc/{pid}/task/{pid}/syscall"
    joined = threads["joins"].wait
    assert joined.kind == "event" and joined.wakers[0][1] not in (0, pid)
    assert (
        "another" in threads["flock"].wait.text
        and str(pids["holder"]) in threads["flock"].wait.text
    )


def test_what_is_not_observed_is_outside(seen):
    snapshot, _, threads, pids = seen
    assert threads["stdin"].wait.kind == "pipe" and threads["stdin"].wait.outside
    assert (os.getpid(), 0) in threads["stdin"].wait.wakers
    stranger = snapshot.process(os.getpid())
    assert stranger.of == kernel.STRANGER and stranger.threads and stranger.rank is None
    assert threads["fifo"].wait.kind == "fifo" and threads["fifo"].wait.outside
    assert threads["owns"].wait.outside
    assert snapshot.process(pids["forked"]).main().wait.outside  # a signal could come


def test_a_timer_tells_how_long_it_still_runs(seen):
    _, _, threads, _ = seen
    for name in ("timed", "absolute", "relative", "idle", "poll"):
        assert 0 < threads[name].wait.left_s <= 601, name
    assert threads["idle"].wait.kind == threads["absolute"].wait.kind == "timer"
    assert threads["lock"].wait.left_s is None
    assert "at most" in threads["relative"].wait.text
    assert "at most" not in threads["absolute"].wait.text


def test_a_stopped_process_is_stopped_and_nobody_here_can_end_that(seen):
    wait = seen[0].process(seen[3]["stopped"]).main().wait
    assert wait.kind == "stopped" and not wait.wakers and not wait.outside


def test_nobody_is_found_where_the_rank_is_gone(seen):
    assert kernel.family({0: 2**22 - 3}) == [] == list(kernel.snapshot({0: 2**22 - 3}).processes)


def test_a_process_that_ended_while_it_was_read_or_whose_number_is_another_s_now(monkeypatch):
    with sleeper() as child:
        listed = kernel.family({0: child.pid})
        monkeypatch.setattr(kernel, "family", lambda *_: listed)
        listed[:] = [replace(x, started=x.started - 1) for x in listed]
        (taken,) = kernel.snapshot({0: child.pid}).processes
        listed[:] = [replace(x, started=x.started + 1) for x in listed]
    (gone,) = kernel.snapshot({0: child.pid}).processes
    for process in (taken, gone):
        assert "ended" in process.message and not process.threads and process.state == ""


def test_a_thread_that_goes_on_while_the_others_are_read_could_end_its_wait(monkeypatch):
    with sleeper() as child:
        rest = kernel.snapshot({0: child.pid}).of(0).main()
        counted = iter(("1", "2"))
        monkeypatch.setattr(kernel, "_switches", lambda *_: next(counted))
        moved = kernel.snapshot({0: child.pid}).of(0).main()
    assert not rest.wait.outside and moved.wait.outside and "went on" in moved.wait.text


@pytest.mark.parametrize(("name", "word"), [("SIGALRM", "alarm"), ("SIGUSR1", "signal")])
def test_a_signal_that_the_program_handles_could_end_its_waits(name, word):
    code = (
        f"import os, signal; signal.signal(signal.{name}, lambda *_: None); print(flush=True); "
        "os.read(os.pipe()[0], 1)"
    )
    with running(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)) as child:
        child.stdout.readline()
        wait_until(lambda: "pipe" in kernel.procfs.process(child.pid).wchan)
        wait = kernel.snapshot({0: child.pid}).of(0).main().wait
    assert wait.kind == "pipe" and wait.outside and word in wait.text


LOOKS = """
import os, sys
from whyhung.watch import kernel
os.setgroups([]), os.setgid(65534), os.setuid(65534)
for process in kernel.snapshot({0: int(sys.argv[1])}).processes:
    if process.of == 0:
        main = process.main(); wait = main.wait
        said = process.message, process.io_bytes, main.state, wait.kind, wait.outside
        print(repr(said))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_without_rights_it_says_what_would_help_and_root_reads_anybody():
    with sleeper() as mine, sleeper(user=65534) as theirs:
        command = [sys.executable, "-c", LOOKS, str(mine.pid)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        message, io_bytes, state, kind, outside = ast.literal_eval(done.stdout)
        assert "CAP_SYS_PTRACE" in message and "root" in message and not io_bytes
        assert state == "S" and kind in ("timer", "other") and outside
        (seen,) = kernel.snapshot({0: theirs.pid}).processes
        assert seen.main().wait.kind == "timer" and not seen.message


@pytest.mark.full
def test_of_thousands_of_threads_the_first_are_read_and_the_rest_counted():
    code = (
        "import threading, time; threading.stack_size(65536)\n"
        "for _ in range(2000):\n"
        "    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "print(flush=True); time.sleep(600)"
    )
    with running(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)) as child:
        child.stdout.readline()
        wait_until(lambda: kernel.snapshot({0: child.pid}).of(0).main().wait)
        process = kernel.snapshot({0: child.pid}).of(0)
        assert len(process.threads) == 2001 and "2001 threads" in process.message
        assert process.threads[0].main and process.threads[0].wait is not None
        assert 200 < sum(thread.wait is not None for thread in process.threads) <= kernel.MOST


def test_a_kernel_that_tells_no_system_calls_leaves_the_wait_channel(monkeypatch):
    monkeypatch.setattr(kernel, "SYSCALL", "no-such-file")
    with sleeper() as child:
        (process,) = kernel.snapshot({0: child.pid}).processes
    assert "does not tell" in process.message and process.main().wait.outside


def test_a_call_is_told_by_its_number_also_where_it_was_restarted():
    number = next(n for n, name in syscalls.NAMES.items() if name == "restart_syscall")
    text = f"{number} 0x1 0x2 0x3 0x0 0x0 0x0 0x7f 0x7f"
    assert syscalls.call(text, "futex_do_wait").name == "futex"
    assert syscalls.call(text, "do_syscall_64").name == "restart_syscall"
    sleeps = text.replace("0x1 0x2 0x3", "0x0 0x0 0x7f8b7a7fbab0")
    assert syscalls.call(sleeps, "do_syscall_64").name == "clock_nanosleep"
    assert syscalls.call("running", "") is None
    assert syscalls.call("-1 0x1 0x2", "").name == ""
    assert syscalls.call("9999 0x1 0x2 0x3 0x0 0x0 0x0 0x0 0x0", "").name == "syscall 9999"


def test_a_lost_child_is_found_by_its_cookie_and_the_starter_of_ranks_is_a_stranger():
    cookie = "/lost-and-found"
    inner = (
        "import os, subprocess, sys\n"
        "rank = subprocess.Popen(['sleep', '600'])\n"
        "lost = subprocess.check_output(['sh', '-c', 'RANK=3 sleep 600 >/dev/null & echo $!'])\n"
        "print(rank.pid, int(lost), flush=True)\nsys.stdin.read()"
    )
    environment = {**os.environ, COOKIE: cookie}
    starter = subprocess.Popen(
        [sys.executable, "-c", inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True, env=environment,
    )  # fmt: skip
    try:
        rank, lost = map(int, starter.stdout.readline().split())
        of = {process.pid: process.of for process in kernel.family({3: rank, 4: 2**22 - 3}, cookie)}
        assert of == {starter.pid: kernel.STRANGER, rank: 3, lost: 3}
        assert [process.pid for process in kernel.family({3: rank})] == [rank]
    finally:
        end(starter)
