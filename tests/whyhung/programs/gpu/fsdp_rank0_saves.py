# due: HANG:collective or STALLED:collective;
# line: save_checkpoint, wait_for_checkpoint, train_step; rank: 0 or 1; within: 30; ranks: 2;
# runs: --then barrier | --then train; set: first
# Rank 0 alone asks FSDP2 for the full state dict, which gathers; the others are in a barrier or
# train on (FSDP save hangs).
import torch
import torch.distributed as dist
from _shared import join, option
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def save_checkpoint(model, rank):
    if rank == 0:
        print("fault", flush=True)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        torch.save(get_model_state_dict(model, options=options), "checkpoint.pt")


def wait_for_checkpoint():
    dist.barrier()


def train_step(model, optimizer, device):
    inputs = torch.randn(16, 1024, device=device)
    loss = (model(inputs) - inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main():
    then = option("--then", "barrier", "train")
    rank, device = join()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = nn.Sequential(*(Block(1024) for _ in range(3))).to(device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    for step in range(200):
        loss = train_step(model, optimizer, device)
        if step % 20 == 0 and rank == 0:
            print(f"step {step}: {loss:.4f}", flush=True)
        if step == 40:
            save_checkpoint(model, rank)
            if then == "barrier":
                wait_for_checkpoint()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
