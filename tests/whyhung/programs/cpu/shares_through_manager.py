# due: healthy; quiet: 25; set: first
# Two workers compute and put their results into a manager's dictionary; main joins them.
import multiprocessing
import time

from _shared import SCALE


def work(results, lock, name, seconds):
    end, total = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        total += sum(divmod(i, 7)[1] for i in range(20_000))
    with lock:
        results[name] = total


def main():
    with multiprocessing.Manager() as manager:
        results, lock = manager.dict(), manager.Lock()
        workers = [
            multiprocessing.Process(target=work, args=(results, lock, name, 25 * SCALE))
            for name in ("left", "right")
        ]
        for worker in workers:
            worker.start()
        print("quiet", flush=True)
        for worker in workers:
            worker.join()
        print("over", flush=True)
        print(dict(results))


if __name__ == "__main__":
    main()
