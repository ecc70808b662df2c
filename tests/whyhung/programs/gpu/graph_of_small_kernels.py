# due: healthy; quiet: 45; ranks: 2; runs: --by graph | --by launches; set: late
# Rank 1 replays a graph of many small kernels, or launches them one by one, for 45 s; the others
# wait in all_gather.
import time

import torch
import torch.distributed as dist
from _shared import SCALE, join, option


def simulate(state):
    for _ in range(200):
        state = torch.sin(state) * 0.99 + 0.01
    return state


def roll_out(state, by):
    """Makes steps for 45 s and asks for none of their results until the end."""
    print("quiet", flush=True)
    end, step = time.monotonic() + 45 * SCALE, lambda: simulate(state)
    if by == "graph" and state.is_cuda:
        torch.cuda.synchronize()
        graph, kept = torch.cuda.CUDAGraph(), state.clone()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            kept.copy_(simulate(kept))
        step = graph.replay
    while time.monotonic() < end:
        out = step()
        if state.is_cuda and by == "graph":
            torch.cuda.synchronize()
    total = (kept if by == "graph" and state.is_cuda else out).sum().item()
    print("over", flush=True)
    return total


def main():
    by = option("--by", "graph", "launches")
    rank, device = join()
    state = torch.rand(4096, device=device)
    for epoch in range(3):
        total = roll_out(state, by) if rank == 1 and epoch == 1 else state.sum().item()
        every = torch.empty(dist.get_world_size(), device=device)
        dist.all_gather_into_tensor(every, torch.tensor([total], device=device))
        print(f"rank {rank}, epoch {epoch}: {every.tolist()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
