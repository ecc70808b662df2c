# due: healthy; quiet: 25; runs: --by condition | --by join | --by future; set: late
# A thread packs data for 25 s; main waits for it in a condition, in join, or for its future.
import concurrent.futures
import os
import threading
import time
import zlib

from _shared import SCALE, option


def pack(seconds):
    data, end, count = os.urandom(300_000), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        count += len(zlib.compress(data, 6))
    return count


def by_condition(seconds):
    done, packed = threading.Condition(), []

    def work():
        count = pack(seconds)
        with done:
            packed.append(count)
            done.notify()

    with done:
        threading.Thread(target=work).start()
        done.wait_for(lambda: packed)
    return packed[0]


def by_join(seconds):
    thread = threading.Thread(target=pack, args=(seconds,))
    thread.start()
    thread.join()


def by_future(seconds):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(pack, seconds).result(timeout=600)


def main():
    way = {"condition": by_condition, "join": by_join, "future": by_future}
    wait = way[option("--by", "condition", "join", "future")]
    print("quiet", flush=True)
    wait(25 * SCALE)
    print("over", flush=True)


if __name__ == "__main__":
    main()
