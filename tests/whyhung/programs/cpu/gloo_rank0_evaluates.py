# due: healthy; quiet: 30; ranks: 2; runs: --sync barrier | --sync gather; set: first
# Rank 0 evaluates for 30 s under gloo, the other waits in a barrier or in a gather of scores.
import time

import torch
import torch.distributed as dist
from _shared import SCALE, option


def evaluate(model):
    print("quiet", flush=True)
    end, hits = time.monotonic() + 30 * SCALE, 0
    while time.monotonic() < end:
        guess = model(torch.randn(32, 64)).argmax(-1).tolist()
        hits += len([a for a, b in zip(sorted(guess), guess, strict=True) if a == b])
    print("over", flush=True)
    return hits


def main():
    sync = option("--sync", "barrier", "gather")
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), torch.nn.Linear(64, 10)
    for epoch in range(2):
        for _ in range(30):
            model.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            dist.all_reduce(model.weight.grad)
        hits = evaluate(model) if rank == 0 and epoch == 0 else 0
        if sync == "barrier":
            dist.barrier()
        else:
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, hits)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
