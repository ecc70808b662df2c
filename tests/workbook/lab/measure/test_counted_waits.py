from types import SimpleNamespace

import pytest
import torch

from workbook.lab.measure import counting
from workbook.lab.measure.counting import count_syncs, waits_in


def event(name, start, end=None, device="DeviceType.CPU"):
    span = SimpleNamespace(start=start, end=start + 1 if end is None else end)
    return SimpleNamespace(name=name, time_range=span, device_type=device)


STEP = event(counting._RANGE, 100, 200)


WAIT = "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cuMemcpyDtoH_v2"
GO_ON = (
    *("cudaLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cuMemcpyDtoHAsync_v2"),
    *("cudaEventQuery", "cudaEventRecord", "cudaStreamWaitEvent", "aten::item"),
    *("Memcpy DtoH (Device -> Pinned)", "cudaMalloc", "cudaHostAlloc"),
)


def test_calls_that_wait_inside_the_step_are_counted_and_no_others():
    for names, count in ((WAIT, len(WAIT)), (GO_ON, 0)):
        every = [event(name, time) for name in names for time in (50, 99, 150, 201, 300)]
        assert waits_in([*every[:2], STEP, *every[2:]]) == count


def test_the_range_as_the_device_saw_it_is_not_the_hosts():
    mirrored = event(counting._RANGE, 0, 1000, device="DeviceType.CUDA")
    assert waits_in([mirrored, STEP, event("cudaStreamSynchronize", 500)]) == 0
    with pytest.raises(ValueError, match="has no range"):
        waits_in([event("cudaStreamSynchronize", 150)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to wait for")
def test_without_a_gpu_there_is_nothing_to_count():
    with pytest.raises(ValueError, match="torch sees none here"):
        count_syncs(lambda: None)


@pytest.mark.gpu
def test_a_sync_is_counted():
    x = torch.ones(1 << 16, device="cuda")

    def step():
        x.mul_(1.0)
        x.sum().item()
        torch.cuda.synchronize()

    assert count_syncs(step) == 2


@pytest.mark.gpu
def test_work_that_nobody_waits_for_counts_nothing():
    x = torch.ones(1 << 16, device="cuda")
    assert count_syncs(lambda: x.mul_(1.0).sum()) == 0
