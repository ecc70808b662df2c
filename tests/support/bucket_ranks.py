"""Work of each rank in test_ddp.py: one launch, a JSON file a rank, read by the tests."""

import io
import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from nsa.model import parallel
from workbook.lab.observers.arrival import GradientArrival
from workbook.lab.observers.ddp import BucketTrace
from workbook.lab.observers.module_order import ModuleOrder

SIZES = (64, 48, 32, 16)


def model():
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(SIZES)]
    return nn.Sequential(*layers).double()


def wrap(bare, **options):
    return DistributedDataParallel(bare, bucket_cap_mb=0.01, **options)


def train(wrapped, observers, place, steps=3, accumulate=1):
    """Gradients of each step, as lists."""
    found = []
    for step in range(steps):
        wrapped.zero_grad()
        tell(observers, "data", step)
        for micro in range(accumulate):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + place.rank)
            x = torch.randn(4, SIZES[0], generator=generator, dtype=torch.float64)
            with place.micro(wrapped, last=micro == accumulate - 1):
                tell(observers, "forward", step)
                loss = wrapped(x).square().mean()
                tell(observers, "backward", step)
                loss.backward()
        tell(observers, "optimizer", step)
        found.append([p.grad.flatten().tolist() for p in wrapped.parameters()])
        tell(observers, "end", step)
    return found


def tell(observers, name, step):
    for observer in observers:
        observer.on_phase(name, step)


def refusal(make):
    try:
        make()
    except ValueError as error:
        return str(error)
    return "not refused"


class Sometimes(nn.Module):
    """Uses its second layer on rank 0 only: no error, and equal weights."""

    def __init__(self, rank):
        super().__init__()
        self.a, self.b, self.rank = nn.Linear(4, 4), nn.Linear(4, 4), rank

    def forward(self, x):
        x = self.a(x)
        return (self.b(x) if self.rank == 0 else x).sum()


def arrivals_of_a_rank_dependent_branch(place):
    wrapped = wrap(Sometimes(place.rank), find_unused_parameters=True)
    arrival = GradientArrival(wrapped.module, warn=False)
    trace = BucketTrace(wrapped)
    for step in range(2):
        tell([arrival, trace], "data", step)
        loss = wrapped(torch.ones(2, 4))
        tell([arrival, trace], "backward", step)
        loss.backward()
        tell([arrival, trace], "optimizer", step)
    return {
        "arrivals": arrival.rows(),
        "unreachable": arrival.unreachable,
        "gradient_there": wrapped.module.b.weight.grad is not None,
        "labels": [row["buckets"] for row in trace.rows()],
    }


def main(folder):
    torch.set_num_threads(1)
    place = parallel.start("ddp", backend="gloo", device="cpu", timeout_s=60)
    out = io.StringIO()
    wrapped = wrap(model())
    trace = BucketTrace(wrapped, out=out)
    arrival, order = GradientArrival(wrapped.module), ModuleOrder(wrapped.module)
    result = {
        "traced": train(wrapped, [trace, arrival, order], place),
        "rows": trace.rows(),
        "said": out.getvalue(),
        "arrivals": arrival.rows(),
        "modules": [row["name"] for row in order.rows()],
        "plain": train(wrap(model()), [], place),
        "second": refusal(lambda: BucketTrace(wrapped)),
        "long": refusal(lambda: BucketTrace(wrap(model()), steps=range(9))),
        "none": refusal(lambda: BucketTrace(wrap(model()), steps=())),
        "branch": arrivals_of_a_rank_dependent_branch(place),
    }
    hooked = wrap(model().float())
    hooked.register_comm_hook(None, fp16_compress_hook)
    result["hooked"] = refusal(lambda: BucketTrace(hooked))
    built_in = wrap(model())
    built_in._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)
    result["built in"] = refusal(lambda: BucketTrace(built_in))
    paid = wrap(model())
    trace = BucketTrace(paid, steps=range(8), out=out)
    result["accumulated"] = train(paid, [trace], place, steps=2, accumulate=2)
    result["accumulated rows"] = trace.rows()
    result["accumulated plain"] = train(wrap(model()), [], place, steps=2, accumulate=2)
    Path(folder, f"rank{place.rank}.json").write_text(json.dumps(result))
    place.close()


if __name__ == "__main__":
    main(sys.argv[1])
