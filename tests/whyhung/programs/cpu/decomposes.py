# due: healthy; quiet: 22; runs: --calls one | --calls many; set: first
# Singular values of a matrix: one call of about 25 s, or many.
import time

import numpy as np
from _shared import SCALE, option


def seconds_of(size):
    matrix = np.random.default_rng(0).random((size, size))
    start = time.perf_counter()
    np.linalg.svd(matrix, compute_uv=False)
    return time.perf_counter() - start


def main():
    calls = option("--calls", "one", "many")
    seconds_of(400)
    size = 800
    if calls == "one":
        size = int(1000 * (30 * SCALE / min(seconds_of(1000) for _ in range(3))) ** (1 / 3))
    matrix = np.random.default_rng(1).random((size, size))
    print("quiet", flush=True)
    end = time.monotonic() + 25 * SCALE
    while True:
        values = np.linalg.svd(matrix, compute_uv=False)
        if calls == "one" or time.monotonic() > end:
            break
    print("over", flush=True)
    print(size, values[0])


if __name__ == "__main__":
    main()
