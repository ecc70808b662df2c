# due: HANG or STALLED; line: read_sensor; rank: 1; within: 30; ranks: 2; set: first
# Rank 1 is in a C library that waits and keeps the GIL (ctypes.PyDLL), so that none of its Python
# threads moves.
import ctypes
import threading
import time

import torch
import torch.distributed as dist
from _shared import join

libc = ctypes.PyDLL(None)


def read_sensor():
    """A vendor's call that waits for a signal which never comes."""
    libc.pause()
    return 0.5


def heartbeat(path):
    while True:
        with open(path, "a") as log:
            log.write(f"{time.time()}\n")
        time.sleep(2)


def main():
    rank, device = join()
    threading.Thread(target=heartbeat, args=(f"beat{rank}.log",), daemon=True).start()
    gain = torch.ones(1024, device=device)
    for step in range(300):
        dist.all_reduce(gain)
        gain /= dist.get_world_size()
        if step == 120 and rank == 1:
            print("fault", flush=True)
            gain *= read_sensor()
        if step % 20 == 0:
            print(f"rank {rank}, step {step}: {gain.mean().item():.3f}", flush=True)
        time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
