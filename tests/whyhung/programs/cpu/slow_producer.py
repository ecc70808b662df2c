# due: healthy; quiet: 24; runs: --kind thread | --kind process | --kind poll; set: first
# A producer takes 12 s for each item; the consumer waits in get, or asks each half second.
import multiprocessing
import queue
import threading
import time

from _shared import SCALE, option


def render(seconds):
    end, pixels = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        pixels += sum(i % 3 for i in range(10_000))
    return pixels


def produce(items, count):
    for _ in range(count):
        items.put(render(12 * SCALE))


def take(items, poll):
    while True:
        try:
            return items.get(timeout=0.5 if poll else None)
        except queue.Empty:
            pass


def main():
    kind = option("--kind", "thread", "process", "poll")
    items = queue.Queue() if kind == "thread" else multiprocessing.Queue()
    start = threading.Thread if kind == "thread" else multiprocessing.Process
    start(target=produce, args=(items, 2), daemon=True).start()
    print("quiet", flush=True)
    print(sum(take(items, kind == "poll") for _ in range(2)))
    print("over", flush=True)


if __name__ == "__main__":
    main()
