# due: healthy; quiet: 25; runs: --every 1 | --every 0.1; set: first
# Main asks for a file that another process of another session writes after 25 s of work.
import os
import subprocess
import sys
import time

from _shared import SCALE, option

WRITER = """
import sys, time
end, total = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < end:
    total += sum(i * i for i in range(10_000))
open(sys.argv[2], "w").write(str(total))
"""


def wait_for(path, every):
    while not os.path.exists(path):
        time.sleep(every)


def main():
    every = option("--every", 1.0)
    path = os.path.abspath("shard.index")
    command = [sys.executable, "-c", WRITER, str(25 * SCALE), path]
    writer = subprocess.Popen(command, start_new_session=True)
    print("quiet", flush=True)
    wait_for(path, every)
    print("over", flush=True)
    writer.wait()


if __name__ == "__main__":
    main()
