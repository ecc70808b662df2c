# due: healthy; quiet: 22; runs: --codec lzma | --codec bz2; set: first
# A checkpoint is compressed in one call of 25 s.
import argparse
import bz2
import lzma
import os
import time

import numpy as np

SCALE = float(os.environ.get("HANGS_SCALE", 1))


def weights(megabytes):
    return np.random.default_rng(0).normal(size=megabytes * 250_000).astype("float16").tobytes() * 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", choices=("lzma", "bz2"), default="lzma")
    args = parser.parse_args()
    compress = {"lzma": lzma.compress, "bz2": bz2.compress}[args.codec]
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
