# due: HANG:collective or STALLED:collective; line: share_statistics; rank: 0 or 1; within: 30;
# ranks: 2; set: first
# Rank 0 reduces the counts and then broadcasts the scale, the others the other way round
# (collectives in another order).
import torch
import torch.distributed as dist
from _shared import join


def share_statistics(rank, counts, scale):
    """Each branch was written by somebody else."""
    if rank == 0:
        dist.all_reduce(counts)
        dist.broadcast(scale, 0)
    else:
        dist.broadcast(scale, 0)
        dist.all_reduce(counts)
    return counts.sum().item() * scale.mean().item()


def main():
    rank, device = join()
    weight = torch.randn(512, 512, device=device)
    for step in range(400):
        weight = torch.tanh(weight @ weight / 20)
        dist.all_reduce(weight)
        weight /= dist.get_world_size()
        if step % 100 == 0 and rank == 0:
            print(f"step {step}: {weight.norm().item():.3f}", flush=True)
        if step == 250:
            if rank == 0:
                print("fault", flush=True)
            counts = torch.ones(16, device=device)
            scale = torch.rand(4_000_000, device=device)
            print(share_statistics(rank, counts, scale), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
