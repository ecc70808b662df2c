# due: healthy; quiet: 25; runs: --by waitpid | --by pidfd; set: late
# A fork writes the checkpoint to slow storage for 25 s; we wait by waitpid, or by its descriptor.
import os
import pickle
import select
import time

from _shared import SCALE, option


def fork_and_save(state):
    if child := os.fork():
        return child
    time.sleep(26 * SCALE)
    pickle.dumps(state)
    os._exit(0)


def main():
    by = option("--by", "waitpid", "pidfd")
    print("quiet", flush=True)
    child = fork_and_save({"weights": list(range(10_000))})
    if by == "pidfd":
        watched = os.pidfd_open(child)
        select.select([watched], [], [])
        os.close(watched)
    os.waitpid(child, 0)
    print("over", flush=True)


if __name__ == "__main__":
    main()
