"""Time of a loop that the host cannot feed fast enough: operations times microseconds each.

A step that dispatches hundreds of small operations a token takes as long as dispatching them does,
on any GPU. So the case study's times follow from its operation counts, and one constant.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.lab.measure.profiling import profiled
from nsa.lab.observers.graph import count_nodes

BAND_US = (9.5, 14.5)  # of all nine timings

# ATen operations of one layer's forward and backward in the case study's code, batch 1, by design
# and T, as counted in it.
PER_LAYER = {
    ("production", 128): 79_494,
    ("production", 256): 158_502,
    ("production", 512): 316_518,
    ("production", 1024): 648_542,
    ("production", 2048): 1_441_330,
    ("smoke", 1024): 725_490,
}


@dataclass(frozen=True)
class Timing:
    """A step's seconds as the case study reported them."""

    gpu: str
    design: str
    layers: int
    tokens: int
    seconds: float
    said: str

    @property
    def operations(self) -> int:
        return self.layers * PER_LAYER[self.design, self.tokens]

    @property
    def microseconds(self) -> float:
        """Per operation."""
        return 1e6 * self.seconds / self.operations

    def __str__(self) -> str:
        layers = f"{self.layers} layer{'s' if self.layers > 1 else ''}"
        return f"{layers}, T {self.tokens}, {self.gpu}"


TIMINGS = (
    Timing("A100", "production", 1, 256, 2.093, "layer scaling"),
    Timing("A100", "production", 2, 256, 3.049, "layer scaling"),
    Timing("A100", "production", 4, 256, 6.215, "layer scaling"),
    Timing("A100", "production", 12, 256, 19.343, "layer scaling, 'about 66 tokens/s'"),
    Timing("A100", "production", 5, 512, 22.55, "backend runs"),
    Timing("A100", "production", 5, 1024, 46.14, "backend runs"),
    Timing("A100", "production", 5, 2048, 86.3, "backend runs, 'all backends alike'"),
    Timing("A100", "production", 12, 2048, 224.4, "production run"),
    Timing("RTX 3090", "smoke", 6, 1024, 51.2, "the step-5 hang, from its 20 tokens/s"),
)


@dataclass
class Operations:
    """What one step dispatched: operations of the forward and of the backward, and host syncs.

    nodes: of the autograd graph. by_name: how often each operation.
    """

    forward: int = 0
    backward: int = 0
    syncs: int = 0
    nodes: int = 0
    by_name: Counter[str] = field(default_factory=Counter, repr=False)

    @property
    def total(self) -> int:
        return self.forward + self.backward


class Count(TorchDispatchMode):
    """Counts every operation that reaches the dispatcher; 1.4 to 2 times the time of a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.by_name[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


def count(loss: Callable[[], Tensor]) -> Operations:
    """Runs `loss()` and its backward once under the counter.

    Changes nothing but gradients. On a CPU and on a GPU alike: what the host dispatches.
    """
    counter = Count()
    with counter:
        value = loss()
        forward = counter.by_name.total()
        nodes = count_nodes([value])
        value.backward()
    names = counter.by_name
    return Operations(
        forward=forward,
        backward=names.total() - forward,
        syncs=names["_local_scalar_dense"],
        nodes=nodes,
        by_name=names,
    )


def count_kernels(step: Callable[[], object]) -> int:
    """Kernels that one call of `step` runs on the GPU, copies and fills left out.

    ValueError without a GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("kernels are a GPU's, and torch sees none here; `count` counts operations")
    torch.cuda.synchronize()
    with profiled([torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = (event for event in profile.events() if "CUDA" in str(event.device_type))
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in kernels)
