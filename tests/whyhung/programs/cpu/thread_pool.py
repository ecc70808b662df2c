# due: healthy; quiet: 25; runs: --work wait | --work compress; set: first
# A pool of threads fetches or compresses for 25 s; main waits for the last of them.
import concurrent.futures
import os
import time
import zlib

from _shared import SCALE, option


def fetch(part, seconds):
    time.sleep(seconds)
    return part


def compress(part, seconds):
    data, end = os.urandom(1_000_000), time.monotonic() + seconds
    while time.monotonic() < end:
        data = zlib.compress(data, 9)[:1_000_000]
    return len(data)


def main():
    form = option("--work", "wait", "compress")
    work = {"wait": fetch, "compress": compress}[form]
    print("quiet", flush=True)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(work, part, 25 * SCALE) for part in range(4)]
        concurrent.futures.wait(tasks)
    print("over", flush=True)
    print(sum(task.result() for task in tasks))


if __name__ == "__main__":
    main()
