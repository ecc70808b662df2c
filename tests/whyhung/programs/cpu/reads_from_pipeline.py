# due: healthy; quiet: 25; runs: --stages one | --stages two; set: late
# A pipeline of other processes works for 25 s before its first line comes.
import subprocess
import sys
import time

from _shared import SCALE, option

MAKE = """
import random, sys, time
end = time.monotonic() + float(sys.argv[1])
rows = []
while time.monotonic() < end:
    rows = sorted(random.random() for _ in range(50_000))
print(*rows[:1000], sep=chr(10))
"""


def read(stages, seconds):
    make = subprocess.Popen([sys.executable, "-c", MAKE, str(seconds)], stdout=subprocess.PIPE)
    last = make
    if stages == "two":
        last = subprocess.Popen(["sort", "-r"], stdin=make.stdout, stdout=subprocess.PIPE)
        make.stdout.close()
    rows = [float(line) for line in last.stdout]
    return last.wait(), make.wait(), len(rows)


def main():
    stages = option("--stages", "one", "two")
    time.sleep(0.1)
    print("quiet", flush=True)
    result = read(stages, 25 * SCALE)
    print("over", flush=True)
    print(result)


if __name__ == "__main__":
    main()
