import pytest
import torch

from nsa.workbook.machine import Machine, find_machine


@pytest.fixture
def gpus(monkeypatch):
    def there_are(number):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a name")

    return there_are


@pytest.mark.parametrize(
    ("device", "wanted", "there", "found"),
    [
        ("auto", 1, 0, ("cpu", "a CPU")),
        ("auto", 1, 1, ("cuda", "a name")),
        ("auto", 2, 1, ("cpu", "a CPU")),
        ("cuda", 2, 2, ("cuda", "a name")),
        ("cpu", 1, 1, ("cpu", "a CPU")),
    ],
)
def test_auto_takes_what_there_is(gpus, device, wanted, there, found):
    gpus(there)
    assert find_machine(device, wanted) == Machine(*found)


@pytest.mark.parametrize(
    ("device", "wanted", "there", "message"),
    [
        ("gpu", 1, 1, "device='gpu' is unknown; known are auto, cpu, cuda"),
        ("cuda", 1, 0, r"needs a GPU and torch .* finds none; device='cpu' would do, or 'auto'"),
        ("cuda", 2, 1, r"needs 2 GPUs and torch .* finds 1;"),
    ],
)
def test_a_device_that_is_not_there_is_refused(gpus, device, wanted, there, message):
    gpus(there)
    with pytest.raises(ValueError, match=message):
        find_machine(device, wanted)


def test_a_cpu_gets_one_thread_a_child_and_a_note_that_times_mean_nothing():
    cpu, gpu = Machine("cpu", "a CPU"), Machine("cuda", "a name")
    assert (cpu.on_cpu, cpu.threads, cpu.note) == (True, 1, "a CPU: only ratios mean anything")
    assert (gpu.on_cpu, gpu.threads, gpu.note) == (False, None, "a name")
