from types import SimpleNamespace

import pytest
import torch

from nsa.lab.measure import counting
from nsa.lab.measure.counting import Syncs, count_syncs, syncs_in


def event(name, start, end=None, device="DeviceType.CPU", parent=None):
    span = SimpleNamespace(start=start, end=start + 1 if end is None else end)
    parent = None if parent is None else SimpleNamespace(name=parent)
    return SimpleNamespace(name=name, time_range=span, device_type=device, cpu_parent=parent)


STEP = event(counting._RANGE, 100, 200)


def test_what_waits_inside_the_step_is_counted_by_call_and_by_operation():
    found = syncs_in(
        [
            STEP,
            event("cudaStreamSynchronize", 110, parent="aten::_local_scalar_dense"),
            event("cudaStreamSynchronize", 120, parent="aten::_local_scalar_dense"),
            event("cudaDeviceSynchronize", 130, parent=counting._RANGE),
            event("cudaMemcpy", 140),
            event("cuMemcpyDtoH_v2", 150),
        ]
    )
    assert found.total == 5
    assert found.by_call["cudaStreamSynchronize"] == 2
    assert found.by_operation == {"aten::_local_scalar_dense": 2, "no operation of torch": 3}


@pytest.mark.parametrize(
    "name",
    [
        *("cudaLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cuMemcpyDtoHAsync_v2"),
        *("cudaEventQuery", "cudaEventRecord", "cudaStreamWaitEvent", "aten::item"),
        "Memcpy DtoH (Device -> Pinned)",
    ],
)
def test_what_does_not_wait_is_not_counted(name):
    assert syncs_in([STEP, event(name, 150)]) == Syncs({})


def test_what_waits_before_or_after_the_step_is_not_the_steps():
    outside = [event("cudaDeviceSynchronize", time) for time in (50, 99, 201, 300)]
    assert syncs_in([*outside[:2], STEP, *outside[2:]]).total == 0


def test_allocations_are_listed_and_not_counted():
    found = syncs_in([STEP, event("cudaMalloc", 110), event("cudaHostAlloc", 120)])
    assert found.by_call == {"cudaMalloc": 1, "cudaHostAlloc": 1}
    assert found.total == 0


def test_the_range_as_the_device_saw_it_is_not_the_hosts():
    mirrored = event(counting._RANGE, 0, 1000, device="DeviceType.CUDA")
    assert syncs_in([mirrored, STEP, event("cudaStreamSynchronize", 500)]).total == 0
    with pytest.raises(ValueError, match="has no range"):
        syncs_in([event("cudaStreamSynchronize", 150)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to wait for")
def test_without_a_gpu_there_is_nothing_to_count():
    with pytest.raises(ValueError, match="torch sees none here"):
        count_syncs(lambda: None)


@pytest.mark.gpu
def test_a_sync_is_counted_and_its_line_is_named():
    x = torch.ones(1 << 16, device="cuda")

    def step():
        x.mul_(1.0)
        x.sum().item()
        torch.cuda.synchronize()

    found = count_syncs(step)
    assert found.by_call["cudaDeviceSynchronize"] == 1
    assert found.by_call["cudaStreamSynchronize"] == 1
    assert found.total == 2
    line = step.__code__.co_firstlineno + 2
    assert any(place.endswith(f"test_counted_waits.py:{line}") for place in found.by_line)


@pytest.mark.gpu
def test_work_that_nobody_waits_for_counts_nothing():
    x = torch.ones(1 << 16, device="cuda")
    found = count_syncs(lambda: x.mul_(1.0).sum())
    assert found == Syncs({})
