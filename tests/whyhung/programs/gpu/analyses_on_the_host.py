# due: healthy; quiet: 45; ranks: 2; set: late
# Rank 0 copies activations to the host again and again and sorts them with NumPy for 45 s; the
# others wait in reduce.
import time

import numpy as np
import torch
import torch.distributed as dist
from _shared import SCALE, join


def quantiles(activations):
    print("quiet", flush=True)
    end, found = time.monotonic() + 45 * SCALE, []
    while time.monotonic() < end:
        host = activations.cpu().numpy()
        order = np.argsort(host, axis=None, kind="stable")
        found.append(host.ravel()[order[:: len(order) // 10]])
        activations = activations * 0.999
    print("over", flush=True)
    return float(np.mean(found))


def main():
    rank, device = join()
    for step in range(6):
        activations = torch.randn(4096, 2048, device=device)
        value = torch.tensor(0.0, device=device)
        if step == 2 and rank == 0:
            value += quantiles(activations)
        dist.reduce(value, 0)
        print(f"rank {rank}, step {step}: {value.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
