"""GPUs that work are told from those that spin, by whatever of NVML or nvidia-smi there is."""

import sys
from types import SimpleNamespace

import pytest
from processes import wait_until

from whyhung.process import preflight
from whyhung.watch import devices
from whyhung.watch.devices import Use, device_use, of_ranks

SPINS = {"dram": 0.06, "tensor": 0.0, "fp32": 0.0, "integer": 1.0, "nvlink": 0.0}


@pytest.mark.parametrize(
    ("use", "works"),
    [
        (Use(0, 0.0), False),
        (Use(0, 100.0, 122.0, 700.0, SPINS), False),
        (Use(0, 100.0, 122.0, 700.0, SPINS | {"fp32": 0.045}), True),  # a graph of small kernels
        (Use(0, 100.0, 390.0, 700.0, SPINS | {"tensor": 24.6, "dram": 13.8}), True),
        (Use(0, 100.0, 122.0, 700.0, SPINS | {"nvlink": 400.0}), True),
        (Use(0, 100.0, 390.0, 700.0), True),  # no counters: by its power
        (Use(0, 100.0, 122.0, 700.0), None),
        (Use(0, 100.0), None),
    ],
)
def test_a_gpu_works_spins_or_nothing_tells(use, works):
    assert use.works is works
    assert f"{use.percent:.0f} % busy" in use.text
    assert use.to_dict()["works"] is works


def test_ranks_have_the_gpu_that_names_them_else_by_their_local_rank(monkeypatch):
    monkeypatch.setattr(devices, "_local_rank", {10: 1, 11: 0, 12: -1}.get)
    two = {0: Use(0, 50.0, pids=(10,)), 1: Use(1, 60.0)}
    found = of_ranks(two, {0: 10, 1: 11, 2: 12})
    assert {rank: use["index"] for rank, use in found.items()} == {0: 0, 1: 0}
    assert of_ranks({3: Use(3, 1.0)}, {7: 12})[7]["index"] == 3  # the only one
    assert of_ranks({}, {0: 10}) == {}


def test_without_nvml_it_is_nvidia_smi_that_tells_and_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    rows = [["0", "97", "121.5", "700.00"], ["1", "3", "[N/A]", "700.00"], ["broken"]]
    monkeypatch.setattr(preflight, "gpus", lambda fields, only=None: rows)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with device_use() as use:
        wait_until(lambda: use.gpus)
        assert use.percent == 97.0
        assert use.gpus == {0: Use(0, 97.0, 121.5, 700.0), 1: Use(1, 3.0, None, 700.0)}
        assert "pip install nvidia-ml-py" in use.missing


def test_a_driver_that_nvml_does_not_find_is_named(monkeypatch):
    class NVMLError(Exception):
        pass

    def fails():
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fails, NVMLError=NVMLError))
    monkeypatch.setattr(preflight, "gpus", lambda fields, only=None: [])
    with device_use() as use:
        assert "Driver Not Loaded" in use.missing
        assert use.percent is None and use.gpus == {}


def test_counters_span_the_time_between_two_reads(monkeypatch):
    values = {4: 1.0, 5: 20.0, 10: 13.0, 11: 0.0, 12: 0.0, 13: 0.0, 60: 3.0, 61: 4.0}

    class NVMLError(Exception):
        pass

    def metrics(asked):
        for metric in asked.metrics[: asked.numMetrics]:
            metric.value, metric.nvmlReturn = values[metric.metricId], int(metric.metricId == 11)

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_GPM_METRICS_GET_VERSION=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetPowerUsage=lambda h: 390_000,
        nvmlDeviceGetEnforcedPowerLimit=lambda h: 700_000,
        nvmlDeviceGetComputeRunningProcesses=lambda h: [SimpleNamespace(pid=10)],
        nvmlDeviceGetUtilizationRates=lambda h: SimpleNamespace(gpu=100),
        nvmlGpmSampleAlloc=object,
        nvmlGpmSampleGet=lambda h, sample: None,
        nvmlGpmSampleFree=lambda sample: None,
        c_nvmlGpmMetricsGet_t=lambda: SimpleNamespace(
            metrics=[SimpleNamespace() for _ in range(10)]
        ),
        nvmlGpmMetricsGet=metrics,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    reader = devices.Nvml()
    (first,) = reader.read()
    assert first.rates == {} and first.pids == (10,) and first.watts == 390.0
    (second,) = reader.read()
    assert second.rates["tensor"] == 20.0 and second.rates["nvlink"] == 7.0
    assert "fp64" not in second.rates  # this GPU does not tell it
    assert second.works
