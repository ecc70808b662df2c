"""A call that is known launches what Triton itself would, and is known by all that matters."""

import threading
from types import SimpleNamespace

import pytest
import torch
from processes import told_by

from nsa.kernels import launch

SEEDS, OF_A_FAULT = 32, 9


@pytest.fixture(scope="module")
def found():
    return told_by("launches.py", SEEDS, OF_A_FAULT)


@pytest.mark.full
def test_known_calls_launch_the_same_kernels_with_the_same_arguments(found):
    assert found["all"]["other"] == [] and found["all"]["launches"] > 1000
    assert found["all"]["looked at again"] == 0  # by Triton, for the third time
    assert len(found["all"]["kernels"]) == 21


@pytest.mark.full
@pytest.mark.parametrize("left_out", ["alignment", "strides", "dtype", "shape"])
def test_each_thing_that_a_call_is_known_by_matters(found, left_out):
    assert found[f"without {left_out}"]["other"]


class Kernel:
    """A product of triton.jit, as `launch` sees it."""

    def __init__(self, name, log):
        self.name, self.log, self.arg_names = name, log, ["x", "n", "BLOCK"]

    def __getitem__(self, grid):
        def launched(*args, **meta):
            self.log.append(("looked at", self.name, grid, args, meta))
            return self

        def known(*args):
            self.log.append(("known", self.name, grid, args))

        return known if len(grid) == 3 else launched


@pytest.fixture
def kernels(monkeypatch):
    log = []
    monkeypatch.setattr(launch, "compiles_for", lambda x: True)
    monkeypatch.setattr(launch, "_known", {})
    return SimpleNamespace(log=log, a=Kernel("a", log), b=Kernel("b", log))


def test_constants_by_name_take_their_places_and_options_none(kernels):
    @launch.prepared
    def call(x):
        launch.launch(kernels.a, (4,), x, 7, BLOCK=64, num_warps=8)

    x = torch.zeros(3)
    call(x)
    call(x)
    assert kernels.log[0] == ("looked at", "a", (4,), (x, 7), {"BLOCK": 64, "num_warps": 8})
    assert kernels.log[1:] == [("known", "a", (4, 1, 1), (x, 7, 64))]


def test_what_is_launched_otherwise_all_the_same_is_looked_at(kernels):
    """A rule may ask for more than the arguments: nothing wrong is launched for it."""
    turns = iter([(kernels.a, 64), (kernels.b, 64), (kernels.b, 32), (kernels.b, 32)])

    @launch.prepared
    def call(x):
        kernel, block = next(turns)
        launch.launch(kernel, (4,), x, 7, BLOCK=block)

    for _ in range(4):
        call(torch.zeros(3))
    assert [one[:2] for one in kernels.log] == [
        ("looked at", "a"), ("looked at", "b"), ("looked at", "b"), ("known", "b"),
    ]  # fmt: skip


def test_a_call_that_failed_is_not_kept_and_leaves_the_next_alone(kernels):
    @launch.prepared
    def call(x, fails):
        launch.launch(kernels.a, (4,), x, 7, BLOCK=64)
        if next(fails):
            raise RuntimeError("out of memory")

    fails = iter([True, False, False])
    with pytest.raises(RuntimeError, match="memory"):
        call(torch.zeros(3), fails)
    assert launch._known == {} and launch._of_thread.call is None
    for _ in range(2):
        call(torch.zeros(3), fails)
    assert [one[0] for one in kernels.log] == ["looked at", "looked at", "known"]


def test_threads_and_calls_within_calls_keep_apart(kernels):
    @launch.prepared
    def inner(x):
        launch.launch(kernels.b, (1,), x, 1, BLOCK=16)

    @launch.prepared
    def outer(x):
        launch.launch(kernels.a, (1,), x, 1, BLOCK=16)
        inner(x)
        thread = threading.Thread(target=inner, args=(x.double(),))
        thread.start()
        thread.join()
        launch.launch(kernels.a, (2,), x, 1, BLOCK=16)

    x = torch.zeros(3)
    outer(x)
    outer(x)
    names = [one[1] for one in kernels.log]
    assert names == ["a", "b", "b", "a"] * 2
    assert [one[0] for one in kernels.log[4:]] == ["known"] * 4


def test_kinds_of_calls_are_forgotten_before_they_are_too_many(kernels, monkeypatch):
    monkeypatch.setattr(launch, "MOST", 3)

    @launch.prepared
    def call(x):
        launch.launch(kernels.a, (4,), x, 7, BLOCK=64)

    for n in range(1, 9):
        call(torch.zeros(n))
        assert len(launch._known) <= 3
