# due: HANG:pipe or STALLED:pipe; line: read_scores; within: 60; runs: --of pipe | --of fifo;
# set: first
# A pipe is read to its end by who holds the other end too: that of a command, or of a fifo.
import os
import subprocess
import tempfile

from _shared import option


def open_pipe():
    reading, writing = os.pipe()
    subprocess.run(["echo", "0.5"], stdout=writing, check=True)
    return reading, writing


def open_fifo():
    fifo = os.path.join(tempfile.mkdtemp(), "scores")
    os.mkfifo(fifo)
    writing = os.open(fifo, os.O_RDWR)
    os.write(writing, b"0.5")
    return os.open(fifo, os.O_RDONLY), writing


def read_scores(reading):
    found = b""
    while part := os.read(reading, 100):
        found += part
    return found


def main():
    of = option("--of", "pipe", "fifo")
    reading, _writing = open_pipe() if of == "pipe" else open_fifo()
    print("fault", flush=True)
    print(read_scores(reading))


if __name__ == "__main__":
    main()
