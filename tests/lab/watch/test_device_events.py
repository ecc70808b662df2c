"""What the thread that follows a device asks, with events that a test lets pass."""

import pytest
import torch

from nsa.lab.watch.counting import DeviceEvents


class Device:
    """As many events pass as `done` says, in the order in which they were recorded."""

    def __init__(self):
        self.made = self.recorded = self.done = self.looks = self.current = 0
        self.capturing = False


class Event:
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
    device = Device()
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
        device.done = before + done
        assert events.passed() == done
        device.done = before + waiting
        assert events.passed() == waiting - done
        assert events.passed() == 0


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
