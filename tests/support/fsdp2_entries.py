"""Work of one rank in test_fsdp2.py: `python fsdp2_entries.py FOLDER`, under its place."""

import importlib.util
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_models import tiny, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from nsa.model.llama import LanguageModel
from nsa.recipes import fsdp2

BATCH, STEPS = 4, 4
SCRIPT = ["--preset", "cpu_test", "--batch", "2", "--tokens", "256", "--dtype", "float32"]


def made(mesh=None, **options):
    """(a model of two layers, its optimizer), alike in every process."""
    torch.manual_seed(7)
    model = LanguageModel(tiny(force_branch="slc" if options.pop("forced", False) else None))
    if mesh is not None:
        fsdp2.shard(model, mesh, **options)
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def trained(model, optimizer, first, last, rows=slice(None)):
    """(loss, norm) of those steps, each on its own batch."""
    found = []
    for index in range(first, last):
        batch = (tokens(BATCH, seed=2 * index + target)[rows] % 7 for target in (0, 1))
        found.append([x.item() for x in fsdp2.step(model, optimizer, *batch)])
    return found


def main(folder):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh, rows, seen = init_device_mesh("cpu", (ranks,)), slice(rank, None, ranks), {}
    model, optimizer = made(mesh, param_dtype=torch.float32)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    seen["fp32"] = trained(model, optimizer, 0, STEPS - 1, rows)
    fsdp2.save(folder / "fp32", model, optimizer, STEPS - 1)
    seen["fp32"] += trained(model, optimizer, STEPS - 1, STEPS, rows)

    model, optimizer = made(mesh)
    seen["bf16"] = trained(model, optimizer, 0, STEPS, rows)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model(tokens(2))[0].dtype == torch.bfloat16
    assert list(model.recomputed) == [0, 1]

    model, optimizer = made(mesh, forced=True, param_dtype=torch.float32, recompute=False)
    trained(model, optimizer, 0, 1, rows)
    fsdp2.save(folder / "forced", model, optimizer, 1)
    assert fsdp2.load(folder / "forced", model, optimizer) == 1

    if importlib.util.find_spec("transformers"):
        from nsa.hf import NSAForCausalLM

        wrapped = NSAForCausalLM.of(made()[0])
        fsdp2.shard(wrapped, mesh, torch.float32)
        loss = wrapped(tokens(2), labels=tokens(2)).loss
        loss.backward()
        assert all(isinstance(p.grad, DTensor) for p in wrapped.parameters())
        seen["hf"] = loss.item()
    torch.save(seen, folder / f"rank{rank}.pt")
    fsdp2.main([*SCRIPT, "--steps", "2", "--folder", str(folder / "script")])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
