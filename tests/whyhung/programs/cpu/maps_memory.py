# due: healthy; quiet: 25; runs: --access gather | --access sort; set: late
# Rows of a large file are gathered in random order, or sorted, through memory maps for 25 s.
import time

import numpy as np
from _shared import SCALE, option


def make(path):
    rows = np.memmap(path, np.float32, "w+", shape=(200_000, 64))
    for start in range(0, len(rows), 20_000):
        rows[start : start + 20_000] = np.random.default_rng(start).random((20_000, 64))
    return rows


def shuffle(rows, access, seconds):
    end, generator = time.monotonic() + seconds, np.random.default_rng(0)
    while time.monotonic() < end:
        if access == "gather":
            part = rows[generator.integers(0, len(rows), 50_000)]
        else:
            part = np.sort(rows[:, generator.integers(0, 64)], kind="stable")
        total = float(part.sum())
        rows.flush()
    return total


def main():
    access = option("--access", "gather", "sort")
    rows = make("rows.bin")
    print("quiet", flush=True)
    total = shuffle(rows, access, 25 * SCALE)
    print("over", flush=True)
    print(total)


if __name__ == "__main__":
    main()
