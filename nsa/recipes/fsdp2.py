"""A training loop on FSDP2 that needs only PyTorch, to run unchanged or to copy.

    torchrun --nproc-per-node 8 -m nsa.recipes.fsdp2 --preset production --folder runs/mine

The next run with that folder resumes where it ended, on any number of ranks. `nsa train --parallel
fsdp` does more; this is the code needed in your own loop, for `nsa.hf.NSAForCausalLM` as well.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nsa.model.data import text
from nsa.model.llama import Block, Decoder, LanguageModel
from nsa.model.presets import PRESETS, preset

# A parameter that no loss has reached, as those of a forced branch, has no optimizer state.
OPTIONS = StateDictOptions(strict=False)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    param_dtype: torch.dtype = torch.bfloat16,
    recompute: bool = True,
) -> nn.Module:
    """Shard the model in place: each block, then the rest. Create the optimizer afterwards.

    Parameters and the optimizer's state are fp32 shards; blocks compute in `param_dtype`, norms and
    the residual stream included, and gradients are summed in fp32. `recompute` keeps only a block's
    input for the backward.
    """
    # Inputs are not cast, because the angles among a block's stay in fp32.
    policy = MixedPrecisionPolicy(param_dtype, torch.float32, cast_forward_inputs=False)
    for module in list(model.modules()):
        if isinstance(module, Decoder) and recompute:
            module.recompute("all")
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    targets: Tensor,
    max_norm: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Run one step on this rank's rows [B, T] int64, equally many on every rank; return (loss,
    gradient norm before clipping), both over all ranks' rows."""
    _, loss = model(tokens, targets)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return mean(loss.detach()), norm.full_tensor() if isinstance(norm, DTensor) else norm


def mean(x: Tensor) -> Tensor:
    """Return the mean of x over ranks."""
    if not dist.is_initialized():
        return x
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def save(folder: str | os.PathLike, model: nn.Module, optimizer: Any, done: int) -> None:
    """Write a checkpoint after `done` steps; each rank writes its own shards."""
    weights, state = get_state_dict(model, optimizer, options=OPTIONS)
    dcp.save({"model": weights, "optimizer": state, "done": done}, checkpoint_id=folder)


def load(folder: str | os.PathLike, model: nn.Module, optimizer: Any) -> int:
    """Load a checkpoint into the model and the optimizer, with any numbers of writing and reading
    ranks, one process without FSDP2 included; return `done`."""
    weights, state = get_state_dict(model, optimizer, options=OPTIONS)
    held = {"model": weights, "optimizer": state, "done": 0}
    dcp.load(held, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=held["model"],
        optim_state_dict=held["optimizer"],
        options=OPTIONS,
    )
    return held["done"]


def newest(folder: Path) -> Path | None:
    """Return the latest complete checkpoint "step-N" in the folder."""
    whole = [file.parent for file in folder.glob("step-*/.metadata")]
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train on the bytes of Python's own sources, and return the losses."""
    parser = argparse.ArgumentParser(prog="nsa.recipes.fsdp2", description=main.__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="smoke")
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints, read and written")
    parser.add_argument("--steps", type=int, default=100, help="in all, those done included")
    parser.add_argument("--batch", type=int, default=8, help="rows of all ranks together")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    given = parser.parse_args(arguments)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if given.batch % ranks:
        raise ValueError(f"--batch {given.batch} is not a multiple of {ranks} ranks")
    torch.manual_seed(0)  # the same weights on all ranks, of which each keeps its shards
    with torch.device(kind):
        model = LanguageModel(preset(given.preset))
    shard(model, init_device_mesh(kind, (ranks,)), getattr(torch, given.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), given.lr, betas=(0.9, 0.95))
    last = newest(given.folder)
    done = load(last, model, optimizer) if last else 0
    data, losses = text(), []
    for index in range(done, given.steps):
        whole = data.batch(index, given.batch, given.tokens, kind)
        loss, norm = step(model, optimizer, *(x[rank::ranks] for x in whole))
        losses.append(loss.item())
        if rank == 0:
            print(f"step {index + 1}: loss {losses[-1]:.4f}, gradient {norm.item():.3f}")
    save(given.folder / f"step-{given.steps}", model, optimizer, given.steps)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
