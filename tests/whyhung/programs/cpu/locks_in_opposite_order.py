# due: HANG:lock or HANG:thread; line: move, rebalance; within: 60; runs: --cache off | --cache on;
# set: first
# Two threads take two buffers' locks in opposite order while a third refreshes a cache (replay
# buffers).
import threading
import time

from _shared import option


class Buffer:
    def __init__(self, name):
        self.name, self.lock, self.items = name, threading.Lock(), list(range(1000))


def move(source, target, meeting):
    with source.lock:
        meeting.wait()  # both have their first lock
        with target.lock:
            target.items.append(source.items.pop())


def refresh_cache(buffer):
    while True:
        sorted(buffer.items, reverse=True)
        sorted(range(30_000), key=lambda i: -i)
        time.sleep(0.2)


def rebalance(old, new):
    meeting = threading.Barrier(2)
    other = threading.Thread(target=move, args=(new, old, meeting))
    other.start()
    print("fault", flush=True)
    move(old, new, meeting)
    other.join()


def main():
    old, new = Buffer("old"), Buffer("new")
    if option("--cache", "off", "on") == "on":
        threading.Thread(target=refresh_cache, args=(old,), daemon=True).start()
    for _ in range(200):
        with old.lock:
            old.items.append(0)
        time.sleep(0.01)
    rebalance(old, new)


if __name__ == "__main__":
    main()
