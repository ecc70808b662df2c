# due: STALLED:pipe or STALLED:fifo or HANG:pipe or HANG:fifo; line: next_job; within: 60;
# runs: --ticker no | --ticker yes; set: late
# A worker opens its queue, a named pipe, for reading; the process that was to write has ended.
import os
import sys
import threading
import time

from _shared import option


def next_job(path):
    with open(path) as jobs:
        return jobs.readline().strip()


def write_job(path, job):
    with open(path, "w") as jobs:
        jobs.write(job + "\n")


def tick():
    for second in range(100_000):
        print(f"\r{second / 5:.1f} s", end="", file=sys.stderr, flush=True)
        sum(range(100_000))
        time.sleep(0.2)


def main():
    if option("--ticker", "no", "yes") == "yes":
        threading.Thread(target=tick, daemon=True).start()
    os.mkfifo("jobs")
    for number in range(20):
        writer = threading.Thread(target=write_job, args=("jobs", f"job {number}"))
        writer.start()
        next_job("jobs")
        writer.join()
    print("fault", flush=True)
    print(next_job("jobs"), flush=True)


if __name__ == "__main__":
    main()
