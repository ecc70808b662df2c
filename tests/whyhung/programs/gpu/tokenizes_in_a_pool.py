# due: healthy; quiet: 45; ranks: 2; runs: --method fork | --method spawn; set: late
# Rank 0 tokenizes with a pool of processes for 45 s and waits for it; the others wait in a
# barrier.
import collections
import multiprocessing
import time

import torch
import torch.distributed as dist
from _shared import SCALE, join, option


def tokenize(seconds):
    counts, end, i = collections.Counter(), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        i += 1
        word = f"word{i * 7919 % 10_007}"
        counts.update(word[k : k + 3] for k in range(len(word) - 2))
    return len(counts)


def prepare(start):
    print("quiet", flush=True)
    with multiprocessing.get_context(start).Pool(2) as pool:
        sizes = pool.map(tokenize, [11.5 * SCALE] * 8, chunksize=1)
    print("over", flush=True)
    return max(sizes)


def main():
    method = option("--method", "fork", "spawn")
    rank, device = join()
    for epoch in range(3):
        x = torch.rand(256, 256, device=device)
        dist.all_reduce(x)
        if epoch == 1:
            if rank == 0:
                print("vocabulary", prepare(method), flush=True)
            dist.barrier()
    print(f"rank {rank}: {x.mean().item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
