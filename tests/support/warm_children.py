"""Starts children of the package as forks of one process that has loaded torch, in tests alone.

`import torch` costs two seconds of a processor, and hundreds of tests start a process that needs
it. `Warm` takes the place of `subprocess.Popen`'s own start for `python -m` of this package and for
kernels of notebooks, where the child would be told apart by nothing but its start time and what it
has loaded: arguments, environment (in /proc too), folder, streams, session, parent and `__main__`
are those of a process that was executed. Everything else is started as always. Where it forks it is
the child of whoever asked: the fork's starter ends at once, and who asked adopts it, as subreaper.

A program of its own too, that serves: `python -c PROGRAM FD PADDING`.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import io
import json
import os
import resource
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import shown_as

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.realpath(os.path.join(HERE, "..", ".."))
PROGRAM = "import sys; sys.path.insert(0, %r); from warm_children import serve; serve(%d)()"
LOADED = (
    "numpy", "pandas", "psutil", "yaml", "jaxtyping", "torch", "torch._dynamo", "torch.export",
    "torch.distributed.run", "torch.distributed.launcher.api", "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing.errors", "torch.nn.attention.flex_attention",
    "torch.utils.flop_counter", "torch.utils.checkpoint", "torch.nn.parallel", "triton",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "torch.distributed.fsdp",
    "scipy.stats", "jsonschema", "nbclient", "nbformat", "papermill", "ipykernel.ipkernel",
    "torch.distributed.elastic.agent.server.local_elastic_agent", "torch.utils.data",
)  # fmt: skip
# ipykernel.kernelapp is not among them: it reads the number of its parent as it is loaded.
# Modules whose process starts others: it gets a server of its own, forked before it has threads.
STARTERS = ("nsa", "workbook", "whyhung", "whyhung.process.ranks", "whyhung.process.family",
            "workbook.runs.batch.job", "ipykernel_launcher")  # fmt: skip
STARTING_ENTRY = "whyhung.process.ranks:launch"
# As ranks it and their torchrun are executed. Forked ones hung where DDP's reducer is freed with
# the GIL held: it joins gloo's thread, which wants the GIL to let go of its last tensor.
RANKS = "whyhung.process.child"
# Of this folder, started without torchrun. Those that compile kernels are executed.
SCRIPTS = ("bucket_ranks.py", "compiled_steps.py", "cp_entries.py", "cp_training.py",
           "fsdp2_entries.py", "guard_ranks.py", "rank_entries.py", "traced_lengths.py",
           "traced_padding.py")  # fmt: skip
KERNEL = "workbook.runs.kernel"  # whose START is a program on a command line that is served
SERVED = "# served\n"  # begins others that are, of tests
UNFROZEN = "frozen_modules=off"  # an option of kernels, for their debugger
# Variables that are read as an interpreter starts or a library loads: the server's are the child's.
READ_EARLY = ("PYTHON", "LD_", "OMP_", "GOMP_", "MKL_", "KMP_", "OPENBLAS", "MALLOC_", "TORCH_",
              "TORCHDYNAMO", "TORCHINDUCTOR", "TRITON_", "CUDA_", "JAXTYPING", "NPY_")  # fmt: skip
SET_LATER = ("PYTHONPATH", "OMP_NUM_THREADS")  # by `_become`
READ_LATER = ("TORCH_NCCL_", "TORCH_FR_", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC",
              "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # fmt: skip
ROOM = 96 * 1024  # bytes for the arguments of a child, and for its environment
_SUBREAPER, _IS_SUBREAPER, _DEATH = 36, 37, 1  # of prctl
_LENGTH = struct.Struct("!Q")
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_cold_start = subprocess.Popen._execute_child
_parameters = inspect.signature(_cold_start)


class Warm:
    """Starts what it can warm, and the rest as `subprocess` does, while it is `installed`."""

    def __init__(self) -> None:
        self.cold = False  # a test that wants real starts sets it
        self.served = 0
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._pid = 0  # whose the socket is: forks of this process have none
        self._server: subprocess.Popen | None = None
        self.installed = False
        self._environment: dict[str, str] = {}

    def install(self) -> None:
        """From now on; the server has what is the environment now."""
        self._environment, self.installed = dict(os.environ), True
        subprocess.Popen._execute_child = lambda popen, *a, **k: self._start(popen, a, k)

    def _start(self, popen: subprocess.Popen, given: tuple, options: dict) -> None:
        asked = None if self.cold else self._request(_parameters.bind(popen, *given, **options))
        if asked is None or not self._forked(popen, *asked):
            _cold_start(popen, *given, **options)

    def _request(self, bound: inspect.BoundArguments) -> tuple[dict, list[int], tuple] | None:
        """The request, streams of the child and ends of its pipes; None if it cannot be served."""
        asked = bound.arguments
        command = _understood(asked["args"])
        plain = {"preexec_fn": None, "close_fds": True, "shell": False, "umask": -1, "uid": None,
                 "gid": None, "gids": None, "process_group": -1, "restore_signals": True,
                 "executable": None}  # fmt: skip
        if command is None or asked["pass_fds"]:
            return None
        if any(asked.get(name, value) not in (value, None) for name, value in plain.items()):
            return None
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        environment = {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()}
        folder = os.path.abspath(os.fsdecode(asked["cwd"] or os.curdir))
        words = [os.fsdecode(word) for word in asked["args"]]
        size = sum(len(os.fsencode(f"{k}={v}")) + 1 for k, v in environment.items())
        if (
            _early(environment) != _early(self._environment)
            or max(size, sum(len(os.fsencode(word)) + 1 for word in words)) > ROOM
            or not os.path.isdir(folder)
            or not _finds_this_package(folder, environment)
        ):
            return None
        pipes = tuple(asked[f"{n}{k}"] for n in ("p2c", "c2p", "err") for k in ("read", "write"))
        streams = [pipes[0], pipes[3], pipes[5]]
        streams = [number if fd == -1 else fd for number, fd in enumerate(streams)]
        with contextlib.suppress(OSError):
            if any(os.isatty(fd) for fd in streams):
                return None
            request = {"command": command, "words": words, "environment": environment,
                       "folder": folder, "session": asked["start_new_session"],
                       "parent": os.getpid(), "limits": _limits()}  # fmt: skip
            return request, streams, pipes
        return None

    def _forked(self, popen, request: dict, streams: list[int], pipes: tuple) -> bool:
        """True if the server made the child, whose Popen this is now."""
        text, before = json.dumps(request).encode(), ctypes.c_int()
        with self._lock:
            self._begin()
            _prctl(_IS_SUBREAPER, ctypes.byref(before), 0, 0, 0)
            _prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [_LENGTH.pack(len(text))], streams)
                self._socket.sendall(text)
                pid = _LENGTH.unpack(_exactly(self._socket, _LENGTH.size))[0]
            except (OSError, EOFError):
                self._pid = 0  # the server is gone
                return False
            finally:
                _prctl(_SUBREAPER, before.value, 0, 0, 0)
        popen._child_created = True
        popen.pid = pid
        popen._close_pipe_fds(*pipes)
        self.served += 1
        return True

    def ready(self) -> None:
        """Returns once there is a server that has loaded all, so that no deadline pays for it."""
        with self._lock:
            self._begin()

    def _begin(self) -> None:
        """Begins a server of this process's own, which ends when this process does."""
        if self._pid == os.getpid():
            return
        ours, theirs = socket.socketpair()
        program = PROGRAM % (HERE, theirs.fileno())
        # What it is called with is room for what its children are called with, see `shown_as`.
        command = [sys.executable, "-c", program, "." * ROOM]
        environment = self._environment | {"NSA_TEST_ROOM": "." * ROOM}
        environment["OPENBLAS_NUM_THREADS"] = "1"  # threads that a fork leaves behind are none
        environment.pop("PYTHONPATH", None)
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        cold, self.cold = self.cold, True
        try:
            self._server = subprocess.Popen(
                command, env=environment, cwd=ROOT, pass_fds=[theirs.fileno()], **streams
            )
        finally:
            self.cold = cold
        theirs.close()
        _exactly(ours, 1)
        self._socket, self._pid = ours, os.getpid()

    @contextlib.contextmanager
    def real(self) -> Iterator[None]:
        """Every start is a real one meanwhile."""
        before, self.cold = self.cold, True
        try:
            yield
        finally:
            self.cold = before


WARM = Warm()


def _early(environment) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_EARLY) and name not in SET_LATER
        if not name.startswith(READ_LATER)
    }


def _understood(words) -> dict | None:
    """{"module", "script" or "code", "arguments", "options", "unbuffered"} of what is served.

    That is `python -m` of this package without ranks, kernels, and what ranks of tests run.
    """
    if not isinstance(words, list | tuple) or not words or words[0] != sys.executable:
        return None
    words = [os.fsdecode(word) for word in words]
    found = {"options": [], "unbuffered": False}
    for at, word in enumerate(words[1:], 1):
        if word == "-u":
            found["unbuffered"] = True
        elif word == "faulthandler" and words[at - 1] == "-X":
            found["options"] += [word]
        elif word == f"-X{UNFROZEN}":
            found["options"] += [UNFROZEN]
        elif word == "-c" and _is_served(words[at + 1]):
            return found | {"code": words[at + 1], "arguments": words[at + 2 :]}
        elif word == "-m" and len(words) > at + 1:
            what, arguments = words[at + 1], words[at + 2 :]
            ours = what.partition(".")[0] in ("nsa", "whyhung", "workbook", "ipykernel_launcher")
            if not ours or RANKS in arguments:
                return None
            return found | {"module": what, "arguments": arguments}
        elif os.path.dirname(word) == HERE and os.path.basename(word) in SCRIPTS:
            return found | {"script": word, "arguments": words[at + 1 :]}
        elif word != "-X":
            return None
    return None


def _is_served(code: str) -> bool:
    kernel = sys.modules.get(KERNEL)
    return code.startswith(SERVED) or (kernel is not None and code == kernel.START)


def _finds_this_package(folder: str, environment: dict[str, str]) -> bool:
    """True if its `nsa` is the one beside these tests, and its interpreter starts without hooks."""
    places = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    hooks = ("sitecustomize.py", "usercustomize.py")
    if any(os.path.exists(os.path.join(place, hook)) for place in places for hook in hooks):
        return False
    having = (place for place in places if os.path.isdir(os.path.join(place, "nsa")))
    return os.path.realpath(next(having, ROOT)) == ROOT


def _limits() -> list:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return [[name, *resource.getrlimit(getattr(resource, name))] for name in sorted(names)]


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def serve(fd: int) -> Callable[[], object]:
    """Serves until nobody can ask any more; returns in each child, with what it is to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us gets Ctrl-C, and ends us
    shown_as.places()
    # First these files: entry points load this package, and another copy of it may be installed.
    sys.path[:] = [ROOT, *(p for p in sys.path if p not in (HERE, ""))]
    for name in LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    del sys.path[0]
    connection = socket.socket(fileno=fd)
    connection.sendall(b".")
    return _serve(connection, list(sys.path))


def _serve(connection: socket.socket, own_path: list[str]) -> Callable[[], object]:
    gc.collect()
    gc.freeze()
    while True:
        try:
            head, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
            head += _exactly(connection, _LENGTH.size - len(head))
            request = json.loads(_exactly(connection, _LENGTH.unpack(head)[0]))
        except (EOFError, OSError):
            os._exit(0)
        reading, writing = os.pipe()
        starter = os.fork()
        if starter == 0:
            if os.fork():
                os._exit(0)
            if request["session"]:
                os.setsid()  # before its Popen is there: who starts kernels asks for their group
            os.write(writing, _LENGTH.pack(os.getpid()))
            os.close(reading)
            os.close(writing)
            connection.close()
            return _become(request, streams, own_path)
        os.close(writing)
        os.waitpid(starter, 0)
        connection.sendall(os.read(reading, _LENGTH.size))
        for number in (reading, *streams):
            os.close(number)


def _become(request: dict, streams: list[int], own_path: list[str]) -> Callable[[], object]:
    """Makes this fork what the command would be that the request was to execute."""
    command, environment = request["command"], request["environment"]
    deadline = time.monotonic() + 30
    while os.getppid() != request["parent"]:  # until who forked us has ended
        if time.monotonic() > deadline:  # so has who asked
            os._exit(1)
        time.sleep(0.0005)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    for fd in streams:
        os.close(fd)
    for name, *limit in request["limits"]:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, name), limit)
    os.chdir(request["folder"])
    os.environ.clear()  # before the memory is written where its variables are
    shown_as.rewrite(request["words"], [f"{name}={value}" for name, value in environment.items()])
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.modules["numpy"].random.seed()  # `random` does so itself
    sys.orig_argv[:] = request["words"]
    if command["unbuffered"]:
        for name, number in (("stdout", 1), ("stderr", 2)):
            setattr(sys, name, _unbuffered(getattr(sys, name), number))
    for name, _, value in (option.partition("=") for option in command["options"]):
        sys._xoptions[name] = value or True
    if "faulthandler" in command["options"]:
        faulthandler.enable()
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = [os.path.abspath(path) for path in paths]
    sys.path[:] = [request["folder"], *dict.fromkeys([*paths, *own_path])]
    importlib.invalidate_caches()
    if command["arguments"][:1] == ["-f"] and "pandas" in sys.modules:  # a kernel
        # pandas looked for one as it was loaded, and without it shows as many columns as fit.
        sys.modules["pandas"].set_option("display.max_columns", 20)
    starts = command.get("module") in STARTERS or command["arguments"][:1] == [STARTING_ENTRY]
    if starts or "code" in command:
        _keep_a_server(own_path)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in (__name__, shown_as.__name__):  # who lists what is loaded sees what was asked for
        del sys.modules[name]
    main = sys.modules["__main__"].__dict__
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    if "script" in command:
        script = command["script"]
        sys.path[0] = os.path.dirname(script)
        sys.argv[:] = [script, *command["arguments"]]
        main |= {"__file__": script, "__cached__": None}
        with open(script) as file:
            return functools.partial(exec, compile(file.read(), script, "exec"), main)
    if "code" in command:
        sys.path[0] = ""
        sys.argv[:] = ["-c", *command["arguments"]]
        return functools.partial(exec, command["code"], main)
    sys.argv[:] = ["-m", *command["arguments"]]
    return functools.partial(runpy._run_module_as_main, command["module"])


def _keep_a_server(own_path: list[str]) -> None:
    """Forks a server for what this process starts; that of its parent cannot make it a child."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        WARM.__init__()
        WARM._socket, WARM._pid = ours, os.getpid()  # the one that was just forked
        WARM.install()
        return
    ours.close()
    _prctl(_DEATH, signal.SIGKILL, 0, 0, 0)
    shown_as.rewrite(
        ["warm_children"], []
    )  # with the variables it would be one of a trial's family
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)
    _serve(theirs, own_path)()
    os._exit(0)


def _unbuffered(stream, number: int) -> io.TextIOWrapper:
    raw = io.FileIO(number, "w", closefd=False)
    made = io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True)
    made.mode = "w"
    return made
