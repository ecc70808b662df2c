# due: healthy; quiet: 30; ranks: 2; runs: --work reads | --work sleeps; set: late
# Rank 1 prepares its data for 30 s before it joins the process group; rank 0 waits in
# init_process_group.
import os
import time

import torch
import torch.distributed as dist
from _shared import SCALE, option


def read(seconds):
    end, lines = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        with open(torch.__file__) as file:
            lines += len(sorted(file))
    return lines


def main():
    work = option("--work", "reads", "sleeps")
    if os.environ["RANK"] == "1":
        print("quiet", flush=True)
        (read if work == "reads" else time.sleep)(30 * SCALE)
        print("over", flush=True)
    dist.init_process_group("gloo")
    total = torch.ones(4)
    for _ in range(20):
        dist.all_reduce(total)
    print(f"rank {dist.get_rank()}: {total.sum().item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
