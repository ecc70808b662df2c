"""Work of each rank in test_parallel.py: `python rank_entries.py FOLDER BACKEND`, under its place.

Leaves FOLDER/rank<r>.pt: what each way of training gave, all of it on the CPU.
"""

import copy
import sys
from pathlib import Path

import torch
from tiny_models import tiny, tokens
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor

from nsa.model import parallel
from nsa.model.llama import LanguageModel
from nsa.model.parallel import Parallel
from workbook.lab.observers.ddp import BucketTrace

BATCH = 4
STEPS = 2
DDP, STATIC, FSDP = {"kind": "ddp"}, {"kind": "ddp", "static_graph": True}, {"kind": "fsdp"}
FINDING = DDP | {"find_unused_parameters": True, "gradient_as_bucket_view": False}
# name: (kind and options, micro-batches, changes of the model's config)
WAYS = {
    "ddp": (DDP, 1, {}),
    "ddp accumulated": (DDP, 2, {}),
    "ddp static": (STATIC, 1, {}),
    "ddp static accumulated": (STATIC, 2, {}),
    "ddp static checkpointed": (STATIC, 1, {"checkpoint": "all"}),
    "ddp static, one branch": (STATIC, 1, {"force_branch": "win"}),
    "ddp finding, one branch": (FINDING, 1, {"force_branch": "win"}),
    "ddp, copied gradients": (DDP | {"gradient_as_bucket_view": False}, 1, {}),
    "ddp, small buckets": (DDP | {"bucket_mb": 0.01}, 1, {}),
    "fsdp": (FSDP, 1, {}),
    "fsdp accumulated": (FSDP, 2, {}),
    "fsdp checkpointed": (FSDP, 1, {"checkpoint": "all"}),
    "fsdp, one branch": (FSDP, 1, {"force_branch": "win"}),
    "fsdp, kept": (FSDP | {"fsdp_reshard": False}, 2, {}),
    "fsdp, two blocks": (FSDP | {"fsdp_blocks": 2}, 1, {"layers": 3}),
    "ddp static, shared selection": (STATIC, 1, {"layers": 3, "share_selection": 2}),
    "fsdp, two blocks, shared selection": (
        FSDP | {"fsdp_blocks": 2},
        1,
        {"layers": 4, "share_selection": 3, "checkpoint": "1:"},
    ),
    "fsdp, two blocks checkpointed": (
        FSDP | {"fsdp_blocks": 2},
        2,
        {"layers": 3, "checkpoint": "all"},
    ),
}


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()).cpu()


def made(place, changes):
    torch.manual_seed(7)
    model = LanguageModel(tiny(**changes)).to(place.device)
    return model, place.wrap(model)


def backward(place, wrapped, accumulate=1):
    """Leaves the mean gradients of the global batch; returns the mean loss."""
    rows = place.rows(BATCH, accumulate)
    inputs = tokens(BATCH)[rows].to(place.device)
    targets = tokens(BATCH, seed=1)[rows].to(place.device)
    losses = []
    parts = zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True)
    for number, (x, y) in enumerate(parts, 1):
        with place.micro(wrapped, last=number == accumulate):
            _, loss = wrapped(x, y)
            (loss / accumulate).backward()
        losses.append(loss.detach())
    return place.mean(torch.stack(losses).mean()).cpu()


def train(place, accumulate, changes):
    """Losses, gradients and norms of STEPS steps, the state after them, and the loss with it."""
    model, wrapped = made(place, changes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients, norms = [], [], []
    for _ in range(STEPS):
        losses.append(backward(place, wrapped, accumulate))
        named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        gradients.append({name: whole(gradient) for name, gradient in named})
        norms.append(place.clip(model.parameters(), 0.5).cpu())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state = copy.deepcopy(place.state(model, optimizer))
    return {
        "losses": torch.stack(losses),
        "gradients": gradients,
        "norms": torch.stack(norms),
        "state": state,
        "loss after": loss_with(place, accumulate, changes, state),
    }


def loss_with(place, accumulate, changes, state):
    """The loss after one step of a model made anew that was given rank 0's state."""
    everyone = [copy.deepcopy(state)]  # AdamW goes on in the tensors that it was given
    if place.ranks > 1:
        torch.distributed.broadcast_object_list(everyone, src=0)
    model, wrapped = made(place, changes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    place.load_state(model, optimizer, everyone[0])
    backward(place, wrapped, accumulate)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return backward(place, wrapped, accumulate)


def gathered(at, **options):
    """Loss and gradients of one step under autocast."""
    place = Parallel("fsdp", **options, **at)
    model, wrapped = made(place, {"layers": 3})
    with torch.autocast(torch.device(place.device).type, torch.bfloat16):
        loss = backward(place, wrapped)
    return loss, {name: whole(p.grad) for name, p in model.named_parameters()}


def overflow(place):
    """True if a step is skipped here when a scaled gradient overflowed on the last rank alone."""
    model, wrapped = made(place, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(torch.device(place.device).type, init_scale=4.0)
    backward(place, wrapped)
    before = [whole(p.detach()) for p in model.parameters()]
    if place.rank == place.ranks - 1:
        gradient = model.embed_tokens.weight.grad
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).view(-1)[0] = torch.inf
    scaler.scale(torch.ones((), device=place.device))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    after = [whole(p.detach()) for p in model.parameters()]
    kept = all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    return {"kept": kept, "scale": scaler.get_scale()}


def second_hook(place):
    """Refusal of DDP's buckets to be traced where gradients go as bf16."""
    try:
        BucketTrace(made(place, {})[1])
    except ValueError as error:
        return str(error)
    return "not refused"


def held(place):
    """Bytes of all storages that gradients and DDP's buckets have after a second backward."""
    model, wrapped = made(place, {})
    storages = {}

    def hook(state, bucket):
        storages[bucket.buffer().data_ptr()] = bucket.buffer().untyped_storage().nbytes()
        return allreduce_hook(None, bucket)

    wrapped.register_comm_hook(None, hook)
    for _ in range(2):  # DDP makes its buckets anew after the first
        storages.clear()
        model.zero_grad()
        backward(place, wrapped)
    found = {}
    for tensor in (p.grad for p in model.parameters()):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum((found | storages).values())


def main(folder, backend):
    torch.set_num_threads(1)
    here = parallel.start("ddp", backend=backend, device="cuda" if backend == "nccl" else "cpu")
    at = {"rank": here.rank, "ranks": here.ranks, "device": here.device}
    seen = {
        name: train(Parallel(**options, **at), accumulate, changes)
        for name, (options, accumulate, changes) in WAYS.items()
    }
    hooked = Parallel("ddp", comm_hook="bf16", **at)
    seen["bf16 hook"] = train(hooked, 1, {})
    seen["second hook"] = second_hook(hooked)
    view, copied = (Parallel("ddp", gradient_as_bucket_view=on, **at) for on in (True, False))
    seen["held"] = {"view": held(view), "copied": held(copied)}
    seen["overflow"] = overflow(Parallel("fsdp", **at))
    ways = {}, {"fsdp_gather": "bf16"}, {"fsdp_gather": "bf16", "fsdp_blocks": 2}
    seen["gathered"] = [gathered(at, **options) for options in ways]
    torch.save(seen, Path(folder, f"rank{here.rank}.pt"))
    here.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
