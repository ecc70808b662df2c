# due: healthy; quiet: 25; runs: --lock flock | --lock file; set: first
# Another process holds the cache's lock and fills the cache for 25 s; main waits for its turn.
import fcntl
import os
import subprocess
import sys
import time

from _shared import SCALE, option

FILLER = """
import fcntl, os, sys, time
way, seconds = sys.argv[1], float(sys.argv[2])
lock = open("cache.lock", "w" if way == "flock" else "x")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
end = time.monotonic() + seconds
while time.monotonic() < end:
    open("cache.bin", "wb").write(bytes(i % 251 for i in range(100_000)))
if way == "file":
    os.remove("cache.lock")
"""


def enter(way):
    if way == "flock":
        with open("cache.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
    while way == "file" and os.path.exists("cache.lock"):
        time.sleep(0.1)


def main():
    form = option("--lock", "flock", "file")
    command = [sys.executable, "-c", FILLER, form, str(26 * SCALE)]
    filler = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    filler.stdout.readline()
    print("quiet", flush=True)
    enter(form)
    print("over", flush=True)
    filler.wait()


if __name__ == "__main__":
    main()
