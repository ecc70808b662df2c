# due: healthy; quiet: 22; runs: --codec lzma | --codec bz2; set: first
# A checkpoint is compressed in one call of 25 s.
import bz2
import lzma
import time

import numpy as np
from _shared import SCALE, option


def weights(megabytes):
    return np.random.default_rng(0).normal(size=megabytes * 250_000).astype("float16").tobytes() * 2


def main():
    codec = option("--codec", "lzma", "bz2")
    compress = {"lzma": lzma.compress, "bz2": bz2.compress}[codec]
    sample, times = weights(1), []
    for _ in range(3):
        start = time.process_time()
        compress(sample)
        times.append(time.process_time() - start)
    data = weights(max(1, int(30 * SCALE / min(times))))
    print("quiet", flush=True)
    packed = compress(data)
    print("over", flush=True)
    print(len(data), "bytes to", len(packed))


if __name__ == "__main__":
    main()
