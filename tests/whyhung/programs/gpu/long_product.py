# due: healthy; quiet: 40; ranks: 2; runs: --form many | --form few; set: first
# Rank 1 has 40 s of matrix products queued on its GPU; its host waits for them, the others in
# all_reduce.
import time

import torch
import torch.distributed as dist
from _shared import SCALE, join, option


def seconds_of_one(matrix):
    """Times a product, so that as many are queued as last for 40 s."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        float((matrix @ matrix).sum())
        times.append(time.perf_counter() - start)
    return min(times)


def kernel_matrix(device, form):
    size = 4096 if form == "many" else 24_576
    if device.type == "cpu":
        size = 1024
    matrix = torch.randn(size, size, device=device, dtype=torch.float64) / size**0.5
    count = int(42 * SCALE / seconds_of_one(matrix)) + 1
    print("quiet", flush=True)
    for _ in range(count):
        matrix = matrix @ matrix
        matrix /= 1 + matrix.abs().amax()
    return matrix.diagonal().sum()


def main():
    form = option("--form", "many", "few")
    rank, device = join()
    trace = torch.zeros((), device=device, dtype=torch.float64)
    for step in range(20):
        if step == 10 and rank == 1:
            trace = trace + kernel_matrix(device, form)
        dist.all_reduce(trace)
        value = trace.item()
        if step == 10 and rank == 1:
            print("over", flush=True)
        if step % 10 == 0:
            print(f"rank {rank}, step {step}: {value}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
