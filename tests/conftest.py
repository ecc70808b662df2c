"""Conditions of every test: fixed seeds, poisoned memory, and no device work without a device.

Imports torch and pytest only: a machine with a GPU may have nothing else to test with
(`pytest -m gpu -o addopts=""`). nsa is not imported here, or jaxtyping's hook would come too late
for its modules.
"""

import gc
import importlib.util
import os
import signal
import subprocess
import sys

import pytest
import torch
from poisoned import poison
from warm_children import WARM

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0

os.environ["NSA_HEADLESS"] = "1"
# A shell ignores Ctrl-C for what it puts in the background, and so do all children of that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not DEVICES:
    os.environ["TRITON_INTERPRET"] = "1"  # read when @triton.jit decorates, so before any kernel
    if importlib.util.find_spec("triton"):
        import quick_interpreter

        quick_interpreter.install()
torch.set_num_threads(1)  # tensors this small gain nothing from a second one

STARTED: list[str] = []  # commands that this process has started since the current test began
# Asked once, by whichever test is the first to: for GPUs, and for fonts of a first cache.
ASKED_ONCE = "nvidia-smi", "fc-list", "warm_children"
_start = subprocess.Popen.__init__


def _noted(self, arguments, *more, **options):
    if not any(name in str(arguments) for name in ASKED_ONCE):
        STARTED.append(str(arguments))
    _start(self, arguments, *more, **options)


subprocess.Popen.__init__ = _noted
if not DEVICES and sys.platform == "linux":
    WARM.install()


@pytest.fixture(autouse=True)
def starts_are_warm(request):
    """A test that starts processes finds a warm server there, or none where it wants none."""
    if request.node.get_closest_marker("real_starts"):
        with WARM.real():
            yield
    else:
        if WARM.installed and request.node.get_closest_marker("processes"):
            WARM.ready()
        yield


@pytest.fixture(autouse=True)
def started_processes_are_marked(request):
    """A test that starts a process says so: `pytest -m "not processes"` is one process alone."""
    STARTED.clear()
    yield
    # With a GPU, Triton starts a compiler in any test.
    if STARTED and not DEVICES and not request.node.get_closest_marker("processes"):
        pytest.fail(f"it starts a process without the mark `processes`: {STARTED[0][:200]}")


def pytest_collection_modifyitems(items):
    # Workers take a file each: were a long one the last, all others would wait for its worker.
    long = {x.path for x in items if any(map(x.get_closest_marker, ("slow", "full")))}
    items.sort(key=lambda x: x.path not in long)
    for item in items:
        for mark, needed in (("gpu", 1), ("gpus2", 2)):
            if item.get_closest_marker(mark) and needed > DEVICES:
                reason = f"needs {needed} CUDA device(s), found {DEVICES}"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Types are checked in the quick tests of nsa, which declares them; checks double a step."""
    if "jaxtyping" in sys.modules:
        slow = any(map(item.get_closest_marker, ("slow", "full", "long")))
        checked = not slow and item.path.is_relative_to(item.config.rootpath / "tests/nsa")
        checked = checked or item.get_closest_marker("types")
        sys.modules["jaxtyping"].config.update("jaxtyping_disable", not checked)


def pytest_collection_finish():
    """Freeze all that test modules have imported: collections need not walk through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def figures_are_closed():
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers in every test, whichever ran before it."""
    torch.manual_seed(1337)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison(monkeypatch)


@pytest.fixture(scope="module")
def nothing_before():
    """Hide what earlier modules left in memory from a module that records what is held."""
    from workbook.lab.measure import attribution, recorders

    every = recorders.live_tensors
    gc.collect()
    there = {tensor.untyped_storage()._cdata: tensor for tensor in every("cpu")}

    def since(device):
        return (x for x in every(device) if x.untyped_storage()._cdata not in there)

    with pytest.MonkeyPatch.context() as patched:
        for module in (attribution, recorders):
            patched.setattr(module, "live_tensors", since)
        yield
