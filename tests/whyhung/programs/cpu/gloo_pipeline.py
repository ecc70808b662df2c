# due: healthy; quiet: 25; ranks: 2; runs: --by recv | --by irecv | --by overlap; set: late
# Rank 0's stage works 25 s on its third batch: rank 1 is in recv, or waits for irecv; or rank 0
# works while an asynchronous all_reduce is under way.
import time

import torch
import torch.distributed as dist
from _shared import SCALE, option


def work(seconds):
    end, total = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        total += sum(i * i for i in range(1000)) % 7
    return total


def stage(step):
    if step == 2:
        print("quiet", flush=True)
        work(25 * SCALE)
        print("over", flush=True)


def run_step(step, by, rank, state):
    if by == "overlap":
        reduced = dist.all_reduce(state, async_op=True)
        if rank == 0:
            stage(step)
        reduced.wait()
    elif rank == 0:
        stage(step)
        dist.send(state, dst=1)
    elif by == "recv":
        dist.recv(state, src=0)
    else:
        dist.irecv(state, src=0).wait()


def main():
    by = option("--by", "recv", "irecv", "overlap")
    dist.init_process_group("gloo")
    state = torch.ones(8, 16)
    for step in range(5):
        run_step(step, by, dist.get_rank(), state)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
