# due: STALLED:file lock or STALLED:flock or HANG:file lock or HANG:lock; line: update_cache;
# within: 60; runs: --lock lockf | --lock flock; set: first
# Another process of the user holds the cache's file lock and sleeps for hours (locks on a shared
# home).
import fcntl
import os
import subprocess
import sys

from _shared import option

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
    lock = option("--lock", "lockf", "flock")
    path = os.path.abspath("index.lock")
    take = getattr(fcntl, lock)
    update_cache(path, take)
    command = [sys.executable, "-c", HOLDER, path, lock]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    holder.stdout.readline()
    print("fault", flush=True)
    update_cache(path, take)
    print("updated")


if __name__ == "__main__":
    main()
