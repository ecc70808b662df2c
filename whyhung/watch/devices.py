"""GPU utilization and power, and whether the kernels that run there make progress.

A kernel that spins, or that waits for another rank, keeps its GPU at 100 % without using memory
or a tensor core. NVML (the package nvidia-ml-py) detects that on Hopper and later by performance
counters, elsewhere by power; nvidia-smi reports utilization and power.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

from whyhung.process import preflight
from whyhung.watch.evidence import GPU_BUSY
from whyhung.watch.kernel import environ

EVERY_S = 1.0
# Percent of their peak. On two H100s, a kernel that waits for another rank, or spins on a flag or
# a clock, uses 0.06 % of memory bandwidth, 1 % of the integer units and 0 % of the others; a graph
# of one-block kernels uses 0.05 % of fp32.
WORKS = {"dram": 0.3, "tensor": 1e-3, "fp64": 1e-3, "fp32": 1e-3, "fp16": 1e-3, "integer": 3.0}
MOVES_MIB = 1.0  # a second over NVLink
WARM = 0.4  # of its power limit: spinning kernels draw a fifth of it
_NAMES = {"dram": "memory", "tensor": "tensor cores", "nvlink": "NVLink"}
_METRICS = {  # NVML's numbers of them
    "integer": 4, "tensor": 5, "dram": 10, "fp64": 11, "fp32": 12, "fp16": 13,
    "received": 60, "sent": 61,
}  # fmt: skip


@dataclass(frozen=True)
class Use:
    """Use of one GPU over the last second."""

    index: int
    percent: float  # of the time in which any kernel ran, even a spinning one
    watts: float | None = None
    limit_watts: float | None = None
    rates: dict[str, float] = field(default_factory=dict)  # percent of peak; NVLink in MiB/s
    pids: tuple[int, ...] = ()  # processes with memory there

    @property
    def works(self) -> bool | None:
        """False if the GPU idles or only spins; None if that cannot be measured."""
        if self.percent < GPU_BUSY:
            return False
        if self.rates:
            moved = self.rates.get("nvlink", 0.0) >= MOVES_MIB
            return moved or any(self.rates.get(k, 0.0) >= least for k, least in WORKS.items())
        if self.watts and self.limit_watts and self.watts >= WARM * self.limit_watts:
            return True
        return None

    @property
    def text(self) -> str:
        """ "GPU 1 is 100 % busy at 122 W of 700, memory 0.1 %, tensor cores 0.0 %"."""
        said = f"GPU {self.index} is {self.percent:.0f} % busy"
        if self.watts is not None:
            said += f" at {self.watts:.0f} W"
            said += f" of {self.limit_watts:.0f}" if self.limit_watts else ""
        told = [f"{name} {self.rates[key]:.1f} {'MiB/s' if key == 'nvlink' else '%'}"
                for key, name in _NAMES.items() if key in self.rates]  # fmt: skip
        return ", ".join([said, *told])

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "works": self.works, "text": self.text}


class Nvml:
    """Read this machine's GPUs through NVML; its counters span the time since the previous read.

    Raises ModuleNotFoundError without nvidia-ml-py, RuntimeError if NVML finds no driver.
    """

    def __init__(self) -> None:
        self._nvml = importlib.import_module("pynvml")
        try:
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except self._nvml.NVMLError as error:
            raise RuntimeError(f"NVML: {error}") from error
        self._before: dict[int, Any] = {}  # GPU: a sample of its counters

    def read(self) -> list[Use]:
        return [self._use(index, handle) for index, handle in enumerate(self._handles)]

    def _use(self, index: int, handle: Any) -> Use:
        nvml, told = self._nvml, {}
        with suppress(nvml.NVMLError):
            told["watts"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
            told["limit_watts"] = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        with suppress(nvml.NVMLError):
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            told["pids"] = tuple(process.pid for process in running)
        with suppress(nvml.NVMLError, AttributeError):
            told["rates"] = self._rates(index, handle)
        percent = 0.0
        with suppress(nvml.NVMLError):
            percent = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return Use(index, percent, **told)

    def _rates(self, index: int, handle: Any) -> dict[str, float]:
        nvml = self._nvml
        now, before = nvml.nvmlGpmSampleAlloc(), self._before.get(index)
        nvml.nvmlGpmSampleGet(handle, now)
        self._before[index] = now
        if before is None:
            return {}
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        asked.sample1, asked.sample2, asked.numMetrics = before, now, len(_METRICS)
        for place, number in enumerate(_METRICS.values()):
            asked.metrics[place].metricId = number
        nvml.nvmlGpmMetricsGet(asked)
        nvml.nvmlGpmSampleFree(before)
        found = {
            name: asked.metrics[place].value
            for place, name in enumerate(_METRICS)
            if asked.metrics[place].nvmlReturn == 0
        }
        links = [found.pop(name) for name in ("received", "sent") if name in found]
        return found | ({"nvlink": sum(links)} if links else {})


class Smi:
    """Read GPUs through nvidia-smi, which takes about as long as a step."""

    def __init__(self, only: str | None = None) -> None:
        self._only = only

    def read(self) -> list[Use]:
        rows = preflight.gpus("index,utilization.gpu,power.draw,enforced.power.limit", self._only)
        found = []
        for row in rows:
            with suppress(ValueError):
                index, percent, *watts = row
                told = [float(x) if x.replace(".", "").isdigit() else None for x in watts]
                found.append(Use(int(index), float(percent), *told))
        return found


@contextmanager
def device_use(only: str | None = None) -> Iterator[SimpleNamespace]:
    """`with device_use() as use`: use.percent is the busiest GPU's, None before the first read.

    use.gpus is {index: Use}, use.missing is the reason why performance counters are not read ("" if
    they are). A thread reads them, because that takes longer than a sample may. only: the GPUs to
    include, as CUDA_VISIBLE_DEVICES names them; None: those of this process.
    """
    use, stop = SimpleNamespace(percent=None, gpus={}, missing=""), threading.Event()
    try:
        reader: Nvml | Smi = Nvml()
    except ModuleNotFoundError:
        reader, use.missing = Smi(only), "nvidia-ml-py is not installed (pip install nvidia-ml-py)"
    except (RuntimeError, OSError) as error:
        reader, use.missing = Smi(only), str(error)
    names = preflight.visible(only)

    def ask() -> None:
        while True:
            found = reader.read()
            if names is not None and all(name.isdigit() for name in names):
                found = [each for each in found if str(each.index) in names]
            use.gpus = {each.index: each for each in found}
            use.percent = max((each.percent for each in found), default=None)
            if stop.wait(EVERY_S):
                return

    thread = threading.Thread(target=ask, name="nsa:device use", daemon=True)
    thread.start()
    try:
        yield use
    finally:
        stop.set()
        thread.join()


def of_ranks(gpus: Mapping[int, Use], ranks: Mapping[int, int]) -> dict[int, dict[str, Any]]:
    """{rank: its GPU's `Use.to_dict`} for ranks (rank: pid) whose GPU is known.

    A GPU is matched by the pids that NVML lists, else (as in a container with its own pids) by
    LOCAL_RANK among the visible GPUs; a single GPU is matched to every rank.
    """
    found, places = {}, sorted(gpus)
    for rank, pid in ranks.items():
        mine = [index for index, use in gpus.items() if pid in use.pids]
        if not mine and places:
            local = _local_rank(pid)
            mine = [places[0]] if len(places) == 1 else places[local : local + 1] * (local >= 0)
        if mine:
            found[rank] = max((gpus[index] for index in mine), key=lambda x: x.percent).to_dict()
    return found


def _local_rank(pid: int) -> int:
    told = next((e[11:] for e in environ(pid) if e.startswith(b"LOCAL_RANK=")), b"")
    return int(told) if told.isdigit() else -1
