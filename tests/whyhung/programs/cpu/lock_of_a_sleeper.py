# due: STALLED:file lock or STALLED:flock or HANG:file lock or HANG:lock; line: update_cache;
# within: 60; runs: --lock lockf | --lock flock; set: first
# Another process of the user holds the cache's file lock and sleeps for hours (locks on a shared
# home).
import argparse
import fcntl
import os
import subprocess
import sys

HOLDER = """
import fcntl, sys, time
held = open(sys.argv[1], "a")
getattr(fcntl, sys.argv[2])(held, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(7200)
"""


def update_cache(path, take):
    with open(path, "a") as cache:
        take(cache, fcntl.LOCK_EX)
        cache.write("entry\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lock", choices=("lockf", "flock"), default="lockf")
    args = parser.parse_args()
    path = os.path.abspath("index.lock")
    take = getattr(fcntl, args.lock)
    update_cache(path, take)
    command = [sys.executable, "-c", HOLDER, path, args.lock]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    holder.stdout.readline()
    print("fault", flush=True)
    update_cache(path, take)
    print("updated")


if __name__ == "__main__":
    main()
