"""One program whose threads each wait on another sort of socket or event, and one look at it."""

import ast
import os
import socket
import subprocess
import sys
import time

import pytest

from whyhung.watch import kernel, sockets

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc"),
]
PROGRAM = r"""
import asyncio, ctypes, os, select, socket, struct, subprocess, sys, threading, time

libc = ctypes.CDLL(None)
os.chdir(sys.argv[1])

def connected(family=socket.AF_INET, host="127.0.0.1"):
    server = socket.create_server((host, 0), family=family)
    client = socket.create_connection(server.getsockname()[:2])
    return client, server.accept()[0], server

tcp, tcp_end, server = connected()
tcp6, tcp6_end, _ = connected(socket.AF_INET6, "::1")
pending_server = socket.create_server(("127.0.0.1", 0))
pending = socket.create_connection(pending_server.getsockname())
mine, yours = socket.socketpair()
theirs, given = socket.socketpair()
patient, patient_end = socket.socketpair()
patient.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 600, 0))
far = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
named = socket.socket(socket.AF_UNIX)
named.bind("named")
named.listen()
to_named = socket.socket(socket.AF_UNIX)
to_named.connect("named")
accepted = named.accept()[0]
child = subprocess.Popen(["sleep", "600"], pass_fds=[given.fileno(), tcp6_end.fileno()])
given.close(), tcp6_end.close()
event, datagrams = libc.eventfd(0, 0), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(("127.0.0.1", 0))
timer = libc.timerfd_create(1, 0)
libc.timerfd_settime(timer, 0, (ctypes.c_long * 4)(0, 0, 600, 0), None)
notify = libc.inotify_init1(0)
inner, outer = select.epoll(), select.epoll()
inner.register(yours, select.EPOLLIN)
outer.register(inner, select.EPOLLIN)
pidfd = os.pidfd_open(child.pid)

def timed_out():
    waiting = socket.socket()
    waiting.settimeout(600)
    waiting.bind(("127.0.0.1", 0))
    waiting.listen()
    waiting.accept()

waits = dict(
    tcp=lambda: tcp.recv(1), tcp6=lambda: tcp6.recv(1), pending=lambda: pending.recv(1),
    pair=lambda: mine.recv(1), theirs=lambda: theirs.recv(1), far=lambda: far.recv(1),
    named=lambda: to_named.recv(1), listens=server.accept, timed_out=timed_out,
    patient=lambda: patient.recv(1),
    datagram=lambda: datagrams.recv(1), event=lambda: os.read(event, 8),
    timer=lambda: os.read(timer, 8), inotify=lambda: os.read(notify, 4096), nested=outer.poll,
    several=lambda: select.select([tcp6, theirs], [], [], 600),
    process=lambda: select.select([pidfd], [], []),
    loop=lambda: asyncio.run(asyncio.Event().wait()), nothing=lambda: select.epoll().poll(),
)
numbers = {}
def begin(name, wait):
    numbers[name] = libc.gettid()
    wait()

for name, wait in waits.items():
    threading.Thread(target=begin, args=(name, wait), daemon=True).start()
while len(numbers) < len(waits):
    time.sleep(0.01)
print(repr((numbers, child.pid)), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The snapshot, the rank's pid, its threads by what they wait for, and its child's pid."""
    folder = tmp_path_factory.mktemp("sockets")
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", PROGRAM, str(folder), str(server.getsockname()[1])]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        program = subprocess.Popen(command, **pipes, start_new_session=True)
        try:
            far, _ = server.accept()
            numbers, child = ast.literal_eval(program.stdout.readline().decode())
            until = time.monotonic() + 60
            while time.monotonic() < until:
                snapshot = kernel.snapshot({0: program.pid})
                threads = {thread.tid: thread for thread in snapshot.of(0).threads}
                named = {name: threads[tid] for name, tid in numbers.items()}
                asleep = all(thread.wait is not None for thread in threads.values())
                if asleep and "ep" in named["loop"].wchan:
                    break
                time.sleep(0.05)
            yield snapshot, program.pid, {name: x.wait for name, x in named.items()}, child
            far.close()
        finally:
            os.killpg(program.pid, 9)
            program.communicate()


def test_the_other_end_of_a_connection_is_the_process_that_holds_it(seen):
    _, pid, waits, child = seen
    own = {"tcp", "pair", "named", "nested", "event", "loop", "nothing", "pending"}
    for name in own:
        assert (waits[name].wakers, waits[name].outside) == (((pid, 0),), False), waits[name]
    for name in ("tcp6", "theirs", "several", "process"):
        assert (waits[name].wakers, waits[name].outside) == (((child, 0),), False), waits[name]
    kinds = {name: waits[name].kind for name in ("tcp", "theirs", "event", "process", "several")}
    assert kinds == {"tcp": "socket", "theirs": "socket", "event": "event", "process": "child",
                     "several": "socket"}  # fmt: skip
    assert "accepted" in waits["pending"].text and "127.0.0.1" in waits["tcp"].text
    assert 0 < waits["several"].left_s <= 600


def test_who_listens_or_has_its_other_end_elsewhere_waits_for_the_outside(seen):
    snapshot, _, waits, _ = seen
    for name in ("listens", "timed_out", "datagram", "inotify"):
        assert waits[name].outside and not waits[name].wakers, waits[name]
    assert "UDP" in waits["datagram"].text and 0 < waits["timed_out"].left_s <= 600
    assert waits["far"].outside and waits["far"].wakers == ((os.getpid(), 0),)
    assert str(os.getpid()) in waits["far"].text
    assert snapshot.process(os.getpid()).of == kernel.STRANGER


def test_a_timer_in_a_descriptor_tells_how_long_it_still_runs(seen):
    wait = seen[2]["timer"]
    assert wait.kind == "timer" and 500 < wait.left_s <= 600


def test_a_timeout_of_the_socket_itself_is_seen(seen):
    assert seen[2]["patient"].left_s == 600 and "at most" in seen[2]["patient"].text
    assert seen[2]["tcp"].left_s is None


def test_addresses_read_as_people_write_them():
    assert sockets._address("0100007F:0050") == "127.0.0.1:80"
    assert sockets._address("0000000000000000FFFF00000100007F:1F90") == "127.0.0.1:8080"
    assert sockets._address("00000000000000000000000001000000:0001") == "::1:1"


def test_a_kernel_that_tells_of_no_unix_sockets_leaves_them_unknown(monkeypatch):
    def refuses():
        raise OSError("no such protocol")

    monkeypatch.setattr(sockets, "unix_sockets", refuses)
    one, other = socket.socketpair()
    with one, other:
        assert sockets.Sockets(os.getpid()).get(os.fstat(one.fileno()).st_ino) is None
