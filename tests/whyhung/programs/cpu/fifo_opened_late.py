# due: healthy; quiet: 25; runs: --how open | --how poll; set: late
# Another job opens a fifo for writing after 25 s: our open waits for it, or we poll.
import os
import select
import subprocess
import tempfile

from _shared import SCALE, option


def read_score(fifo, how):
    if how == "open":
        with open(fifo) as scores:
            return float(scores.readline())
    with open(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)) as scores:
        polled = select.poll()
        polled.register(scores, select.POLLIN)
        while not polled.poll(1000):
            pass
        return float(scores.readline())


def main():
    how = option("--how", "open", "poll")
    fifo = os.path.join(tempfile.mkdtemp(), "scores")
    os.mkfifo(fifo)
    later = f"(sleep {26 * SCALE}; timeout 60 sh -c 'echo 0.5 >{fifo}') >/dev/null 2>&1 &"
    subprocess.run(["setsid", "sh", "-c", later], check=True, stdin=subprocess.DEVNULL)
    print("quiet", flush=True)
    score = read_score(fifo, how)
    print("over", flush=True)
    print(score)


if __name__ == "__main__":
    main()
