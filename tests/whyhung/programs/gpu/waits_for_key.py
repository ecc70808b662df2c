# due: HANG or STALLED; line: wait_for_vocabulary; rank: 0 or 1; within: 30; ranks: 2; set: late
# Rank 1 waits for a key of the store that rank 0 sets only if it had to build the vocabulary;
# rank 0 is in all_reduce.
import datetime
import os

import torch
import torch.distributed as dist
from _shared import join


def wait_for_vocabulary(store):
    store.wait(["vocabulary"], datetime.timedelta(minutes=30))
    return store.get("vocabulary")


def build_vocabulary(store):
    if not os.path.exists("vocabulary.txt"):
        with open("vocabulary.txt", "w") as file:
            file.write("a b c")
        store.set("vocabulary", "built")


def main():
    rank, device = join()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        with open("vocabulary.txt", "w") as file:  # an earlier job made it
            file.write("a b c")
        build_vocabulary(store)
        print("fault", flush=True)
    else:
        print(wait_for_vocabulary(store), flush=True)
    total = torch.ones(1024, device=device)
    for step in range(100):
        dist.all_reduce(total)
        total /= dist.get_world_size()
        if step % 20 == 0:
            print(f"rank {rank}, step {step}: {total.sum().item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
