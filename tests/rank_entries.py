"""What test_parallel.py has each rank do: `python rank_entries.py FOLDER`, in a rank's environment.

Leaves FOLDER/rank<r>.pt, and a checkpoint of each kind that a single process is to load.
"""

import copy
import sys
from pathlib import Path

import torch
from tiny_models import tiny, tokens
from torch.distributed.tensor import DTensor

from nsa.model import parallel
from nsa.model.llama import LanguageModel

BATCH = 4
STEPS = 2


def make(**changes):
    torch.manual_seed(7)
    return LanguageModel(tiny(**changes))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def backward(place, model, wrapped, accumulate=1):
    """Leaves the mean gradients of the global batch; returns the mean loss."""
    rows = place.rows(BATCH, accumulate)
    inputs, targets = tokens(BATCH)[rows], tokens(BATCH, seed=1)[rows]
    losses = []
    parts = zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True)
    for number, (x, y) in enumerate(parts, 1):
        with place.micro(wrapped, last=number == accumulate):
            _, loss = wrapped(x, y)
            (loss / accumulate).backward()
        losses.append(loss.detach())
    return place.mean(torch.stack(losses).mean())


def train(place, accumulate=1, **changes):
    """Loss and gradients of each step, the clipped norms, and the state after the last."""
    model = make(**changes)
    wrapped = place.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients, norms = [], [], []
    for _ in range(STEPS):
        losses.append(backward(place, model, wrapped, accumulate))
        gradients.append(
            {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        )
        norms.append(place.clip(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state = copy.deepcopy(place.state(model, optimizer))
    return {
        "losses": torch.stack(losses),
        "gradients": gradients,
        "norms": torch.stack(norms),
        "state": state,
        "after": after(place, model, wrapped, optimizer, state),
    }


def after(place, model, wrapped, optimizer, state):
    """The loss after a load into this very wrapped model, whose weights were spoilt before."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0)
    everyone = [state]
    if place.ranks > 1:
        torch.distributed.broadcast_object_list(everyone, src=0)
    place.load_state(model, optimizer, everyone[0])
    return backward(place, model, wrapped)


def main(folder):
    torch.set_num_threads(1)
    ddp = parallel.start("ddp", backend="gloo")
    static = parallel.Parallel("ddp", ddp.rank, ddp.ranks, static_graph=True)
    finding = parallel.Parallel("ddp", ddp.rank, ddp.ranks, find_unused_parameters=True)
    fsdp = parallel.Parallel("fsdp", ddp.rank, ddp.ranks)
    seen = {
        "ddp": train(ddp),
        "ddp accumulated": train(ddp, accumulate=2),
        "ddp static": train(static),
        "ddp static accumulated": train(static, accumulate=2),
        "ddp static checkpointed": train(static, checkpoint="all"),
        "ddp static window alone": train(static, force_branch="win"),
        "ddp finding window alone": train(finding, force_branch="win"),
        "fsdp": train(fsdp),
        "fsdp accumulated": train(fsdp, accumulate=2),
        "fsdp checkpointed": train(fsdp, checkpoint="all"),
        "fsdp window alone": train(fsdp, force_branch="win"),
    }
    torch.save(seen, Path(folder, f"rank{ddp.rank}.pt"))
    ddp.close()


if __name__ == "__main__":
    main(sys.argv[1])
