# due: HANG:pipe or HANG:queue or HANG:process or HANG:child or STALLED:pipe; line: embed, main;
# within: 60; runs: --start fork | --start spawn; set: first
# Children put large results into a queue and are joined before it is read: the feeder waits for
# the full pipe.
import multiprocessing

import numpy as np
from _shared import option


def embed(results, part):
    vectors = np.random.default_rng(part).random((2000, 64))
    results.put((part, vectors))


def main():
    start = option("--start", "fork", "spawn")
    context = multiprocessing.get_context(start)
    results = context.Queue()
    children = [context.Process(target=embed, args=(results, part)) for part in range(2)]
    for child in children:
        child.start()
    print("fault", flush=True)
    for child in children:
        child.join()
    vectors = dict(results.get() for _ in children)
    print("embedded", sum(len(part) for part in vectors.values()))


if __name__ == "__main__":
    main()
