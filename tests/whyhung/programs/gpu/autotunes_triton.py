# due: healthy; quiet: 40; ranks: 2; set: first
# Rank 1 tunes a Triton matrix product over many configurations for 40 s; the others wait in
# all_reduce.
import os
import tempfile
import time

from _shared import SCALE, join

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch
import torch.distributed as dist

try:
    import triton
    import triton.language as tl

    @triton.jit
    def matmul(a, b, c, N, M: tl.constexpr, K: tl.constexpr, S: tl.constexpr):
        rows = tl.program_id(0) * M + tl.arange(0, M)
        cols = tl.program_id(1) * K + tl.arange(0, K)
        total = tl.zeros((M, K), tl.float32)
        for start in range(0, N, S):
            inner = start + tl.arange(0, S)
            left = tl.load(a + rows[:, None] * N + inner[None, :])
            right = tl.load(b + inner[:, None] * N + cols[None, :])
            total += tl.dot(left, right)
        tl.store(c + rows[:, None] * N + cols[None, :], total)
except ImportError:
    matmul = None


def timed(a, config):
    m, k, s, warps, stages = config
    out = torch.empty(a.shape, device=a.device)
    grid = (a.shape[0] // m, a.shape[0] // k)
    start = time.perf_counter()
    for _ in range(20):
        matmul[grid](a, a, out, a.shape[0], m, k, s, num_warps=warps, num_stages=stages)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def autotune(device):
    print("quiet", flush=True)
    tiles = [(m, k, s) for m in (32, 64, 128) for k in (32, 64, 128) for s in (16, 32, 64)]
    configs = [
        (*tile, warps, stages) for warps in (2, 4, 8) for stages in (1, 2, 3) for tile in tiles
    ]
    end, best = time.monotonic() + 40 * SCALE, {}
    for n in (1024, 2048, 4096):
        a = torch.randn(n, n, device=device, dtype=torch.float16)
        for config in configs:
            if time.monotonic() < end:
                best[n, config] = timed(a, config) if device.type == "cuda" else a.float().norm()
    print("over", flush=True)
    return min(best, key=best.get)


def main():
    rank, device = join()
    gain = torch.ones(1024, device=device)
    for step in range(30):
        if step == 10 and rank == 1:
            print("best", autotune(device), flush=True)
        dist.all_reduce(gain)
        gain /= dist.get_world_size()
        if step % 10 == 0:
            print(f"rank {rank}, step {step}: {gain.mean().item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
