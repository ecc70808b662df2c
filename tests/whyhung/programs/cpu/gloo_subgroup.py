# due: healthy; quiet: 25; ranks: 2; runs: --by barrier | --by key | --by objects; set: late
# Rank 0 scores for 25 s in a group of its own; rank 1 is in monitored_barrier, asks the store for a
# key, or waits for a list of objects.
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from _shared import SCALE, option


def score(group):
    print("quiet", flush=True)
    end, total = time.monotonic() + 25 * SCALE, torch.ones(1)
    while time.monotonic() < end:
        total += sum(i * i for i in range(1000)) % 7
    dist.all_reduce(total, group=group)
    print("over", flush=True)
    return total.item()


def wait(by, rank, store, found):
    if by == "barrier":
        dist.monitored_barrier(timeout=timedelta(hours=1))
    elif by == "objects":
        dist.broadcast_object_list(found)
    elif rank == 0:
        store.set("scored", "1")
    while by == "key" and not store.check(["scored"]):
        time.sleep(0.5)


def main():
    by = option("--by", "barrier", "key", "objects")
    dist.init_process_group("gloo")
    alone, rank = dist.new_group([0]), dist.get_rank()
    store, found = dist.distributed_c10d._get_default_store(), [None]
    if rank == 0:
        found = [score(alone)]
    wait(by, rank, store, found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
