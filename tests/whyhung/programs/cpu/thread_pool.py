# due: healthy; quiet: 25; runs: --work wait | --work compress; set: first
# A pool of threads fetches or compresses for 25 s; main waits for the last of them.
import argparse
import concurrent.futures
import os
import time
import zlib

SCALE = float(os.environ.get("HANGS_SCALE", 1))


def fetch(part, seconds):
    time.sleep(seconds)
    return part


def compress(part, seconds):
    data, end = os.urandom(1_000_000), time.monotonic() + seconds
    while time.monotonic() < end:
        data = zlib.compress(data, 9)[:1_000_000]
    return len(data)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", choices=("wait", "compress"), default="wait")
    args = parser.parse_args()
    work = {"wait": fetch, "compress": compress}[args.work]
    print("quiet", flush=True)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(work, part, 25 * SCALE) for part in range(4)]
        concurrent.futures.wait(tasks)
    print("over", flush=True)
    print(sum(task.result() for task in tasks))


if __name__ == "__main__":
    main()
