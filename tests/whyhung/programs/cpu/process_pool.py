# due: healthy; quiet: 25; runs: --way map | --way imap | --way executor; set: first
# Documents are counted in other processes for 25 s; main waits for all of them.
import concurrent.futures
import multiprocessing
import time

from _shared import SCALE, option


def count(seconds):
    words, end = {}, time.monotonic() + seconds
    while time.monotonic() < end:
        for i in range(5000):
            words[f"w{i * i % 701}"] = words.get(f"w{i * i % 701}", 0) + 1
    return sum(words.values())


def count_all(way, parts):
    if way == "executor":
        with concurrent.futures.ProcessPoolExecutor(2) as pool:
            return sum(pool.map(count, parts))
    with multiprocessing.Pool(2) as pool:
        if way == "map":
            return sum(pool.map(count, parts, chunksize=1))
        return sum(pool.imap_unordered(count, parts))


def main():
    way = option("--way", "map", "imap", "executor")
    print("quiet", flush=True)
    total = count_all(way, [12.5 * SCALE] * 4 if way != "imap" else [25 * SCALE] * 2)
    print("over", flush=True)
    print(total, "words")


if __name__ == "__main__":
    main()
