# due: HANG:process or HANG:worker or HANG:ended or HANG:lock or STALLED:process or STALLED:lock;
# line: tokenize, count_all; within: 60; runs: --with map | --with imap; set: first
# The OOM killer takes one of a pool's workers; the pool starts another, and the lost task never
# comes back.
import os
import signal
import time
from multiprocessing import Pool

from _shared import option


def tokenize(text):
    words = text.split()
    time.sleep(0.02)
    if len(words) > 5000:
        print("fault", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)  # here memory runs out
    return len(set(words))


def count_all(texts, way):
    with Pool(2) as pool:
        if way == "map":
            return sum(pool.map(tokenize, texts, chunksize=4))
        return sum(pool.imap_unordered(tokenize, texts))


def main():
    form = option("--with", "map", "imap")
    texts = [" ".join(f"t{i * k % 97}" for k in range(200)) for i in range(300)]
    texts[150] = "long " * 6000
    print("words:", count_all(texts, form))


if __name__ == "__main__":
    main()
