# due: STALLED:device or HANG:device; line: augment; rank: 1; within: 30; ranks: 2;
# runs: --form sleep | --form flag; set: first
# Rank 1's GPU executes one kernel for minutes (a flag nobody sets, after reports of custom
# kernels that spin); the others wait.
import time

import torch
import torch.distributed as dist
from _shared import join, option

try:
    import triton
    import triton.language as tl

    @triton.jit
    def wait_for_flag(flag, out):
        seen = tl.load(flag)
        while seen == 0:
            seen = tl.atomic_add(flag, 0)
        tl.store(out, 1.0)
except ImportError:
    wait_for_flag = None


def augment(images, form, device):
    if device.type == "cpu":
        time.sleep(600)
    elif form == "sleep":
        torch.cuda._sleep(10**12)
    else:
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        wait_for_flag[(1,)](flag, images)
    return images.flip(-1)


def main():
    form = option("--form", "sleep", "flag")
    rank, device = join()
    images = torch.rand(16, 3, 64, 64, device=device)
    for step in range(200):
        if step == 60 and rank == 1:
            print("fault", flush=True)
            images = augment(images, form, device)
        mean = images.mean()
        dist.all_reduce(mean)
        images = images / mean
        if step % 20 == 0:
            print(f"rank {rank}, step {step}: {mean.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
