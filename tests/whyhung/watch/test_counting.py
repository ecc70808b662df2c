"""A backward counted by what modules put out, and where that does not do; events of a device."""

from types import SimpleNamespace

import pytest
import torch
from counted import here, nodes_of
from torch import nn

from whyhung.watch import counting
from whyhung.watch.counting import DeviceEvents


class Scaled(nn.Module):
    """`nodes` products, one of which tells `seen` when its backward runs."""

    def __init__(self, nodes, seen=None):
        super().__init__()
        self.nodes, self.seen = nodes, seen

    def forward(self, x):
        for _ in range(self.nodes):
            x = x * 1.0
        if self.seen is not None:
            x.register_hook(lambda _: self.seen())
        return x


def test_where_modules_are_small_their_outputs_count_the_nodes(counters, monkeypatch):
    during, walked = [], []
    walk = counting._nodes
    monkeypatch.setattr(counting, "_nodes", lambda *given: walked.append(1) or walk(*given))
    middle = Scaled(3, lambda: during.append(here(counters)))
    model = nn.Sequential(*(Scaled(3) if n != 29 else middle for n in range(60)))
    x = torch.ones(4, requires_grad=True)
    for watched in (True, False):  # of this model alone, and by whoever attaches
        counters.watch(model) if watched else counters.attach()
        for step in range(3):
            counters.step(step)
            model(x).sum().backward()
            assert here(counters).fired == here(counters).total == 181
        assert len(walked) == 2 - watched  # the first of each: nobody knew how far apart they lie
    assert len(during) == 6
    for p in during:
        assert (p.phase, p.total) == ("backward", 181) and 80 <= p.fired <= 98


def test_a_backward_that_takes_long_is_counted_more_finely_from_then_on(counters, monkeypatch):
    counters.attach()
    model, x = nn.Sequential(*(Scaled(20) for _ in range(8))), torch.ones(4, requires_grad=True)

    def stages():
        """Number of counts seen while one module's 20 nodes run."""
        during, y = set(), model(x)
        node = y.grad_fn
        for number in range(85):
            if number >= 65:
                node.register_prehook(lambda _: during.add(here(counters).fired))
            node = node.next_functions[0][0]
        y.sum().backward()
        return len(during)

    stages()
    assert stages() <= 2
    monkeypatch.setattr(counting, "SHORT_S", 0.0)
    stages()
    assert stages() >= 19


def test_modules_far_apart_are_counted_by_a_walk(counters):
    counters.attach()
    during = []
    model = nn.Sequential(Scaled(3), Scaled(200, lambda: during.append(here(counters))), Scaled(3))
    deep = nn.Sequential(*(Scaled(1) for _ in range(100)))
    x = torch.ones(4, requires_grad=True)
    for step in range(4):
        counters.step(step)
        loss = model(deep(x) if step % 2 else x).sum()
        expected = nodes_of(loss)
        loss.backward()
        assert here(counters).fired == here(counters).total == expected
    assert [p.total for p in during] == 2 * [207, 307]
    assert not counters.outputs._hooks  # none is paid for in vain


def test_where_a_walk_counts_outputs_do_not(counters):
    counters.attach()
    seen = []
    near = nn.Sequential(*(Scaled(2, lambda: seen.append(here(counters))) for _ in range(50)))
    x = torch.ones(4, requires_grad=True)
    for step, far in enumerate((Scaled(60), Scaled(60), Scaled(200))):  # the last was not foreseen
        counters.step(step)
        seen.clear()
        far(near(x)).sum().backward()
    assert len(seen) == 50
    assert all(200 <= p.fired <= p.total == 301 for p in seen)
    assert [p.fired for p in seen] == sorted(p.fired for p in seen)
    assert seen[24].fired == pytest.approx(251, abs=3)


def test_a_graph_that_is_kept_counts_its_nodes_once_in_each_backward(counters):
    counters.attach()
    during = []
    model = nn.Sequential(Scaled(100, lambda: during.append(here(counters).fired)), Scaled(100))
    counters.step(0)
    loss = model(torch.ones(4, requires_grad=True)).sum()
    for _ in range(3):
        loss.backward(retain_graph=True)
    assert during == pytest.approx([101, 201 + 101, 402 + 101], abs=17)


def test_modules_that_run_inside_a_backward_count_in_none_of_its_outputs(counters):
    counters.attach()
    leaf = torch.ones(4, requires_grad=True)
    inner = nn.Sequential(*(Scaled(4) for _ in range(50)))

    def recompute():  # as a checkpoint does
        with torch.enable_grad():
            inner(leaf).sum().backward()

    middle = Scaled(3, recompute)
    model = nn.Sequential(*(Scaled(3) if n != 29 else middle for n in range(60)))
    x = torch.ones(4, requires_grad=True)
    for step in range(3):  # the last two by outputs
        counters.step(step)
        model(x).sum().backward()
        assert here(counters).total == here(counters).fired == 181 + 201


def test_a_forward_counts_in_its_own_backward_alone(counters):
    counters.attach()
    model = nn.Sequential(*(Scaled(2) for _ in range(100)))
    x = torch.ones(4, requires_grad=True)
    model(x).sum().backward()
    counters.step(0)
    first, second = model(x).sum(), model(x).sum()
    first.backward(retain_graph=True)
    assert here(counters).fired == here(counters).total == 402  # two forwards were made
    for n, loss in enumerate((first, second), 1):  # and are walked from now on
        loss.backward()
        assert here(counters).fired == here(counters).total == 402 + 201 * n
    for step in range(2):
        model(x)  # whose backward never comes
        counters.step(step)
        model(x).sum().backward()
        assert here(counters).fired == here(counters).total == 201


class Event:
    """Event of a device, past once the device has done as many as were recorded up to it."""

    def __init__(self, device):
        self.device, self.number, self.on = device, None, None
        device.made += 1

    def record(self):
        assert self.on in (None, self.device.current), "an event is of one device"
        self.on = self.device.current
        self.device.recorded += 1
        self.number = self.device.recorded

    def query(self):
        self.device.looks += 1
        return self.number <= self.device.done


@pytest.fixture
def device(monkeypatch):
    device = SimpleNamespace(made=0, recorded=0, done=0, looks=0, current=0, capturing=False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(device))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
    return device


def recorded(events, count):
    assert all(events.record() for _ in range(count))


@pytest.mark.parametrize("waiting", [1, 2, 5, 64])
def test_each_event_counts_once_however_many_have_passed(device, waiting):
    for done in range(waiting + 1):
        events, before = DeviceEvents(), device.recorded
        recorded(events, waiting)
        for upto, count in ((done, done), (waiting, waiting - done), (waiting, 0)):
            device.done = before + upto
            assert events.passed() == count


def test_of_many_few_are_looked_at(device):
    events = DeviceEvents()
    recorded(events, 1000)
    device.done = 700
    assert events.passed() == 700 and device.looks <= 10


def test_what_has_passed_is_used_again_and_what_has_not_is_not(device):
    events = DeviceEvents()
    for _ in range(20):
        recorded(events, 30)
        device.done = device.recorded - 10
        events.passed()
    assert device.made == 40 and events.passed() == 0
    device.done = device.recorded
    assert events.passed() == 10


def test_an_event_stays_with_its_device(device):
    events = DeviceEvents()
    for turn in range(10):
        device.current = turn % 2
        recorded(events, 3)
        device.done = device.recorded
        assert events.passed() == 3
    assert device.made == 6


def test_while_a_graph_is_captured_nothing_is_recorded_and_nothing_asked(device):
    events = DeviceEvents()
    recorded(events, 4)
    device.done = 4
    device.capturing = True
    assert not events.record()
    events.quiet = True
    assert events.passed() == 0 and device.looks == 0
    device.capturing = events.quiet = False
    assert events.passed() == 4 and events.record()
