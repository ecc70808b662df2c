# due: HANG:lock or HANG:fork or STALLED:lock or HANG:process; line: increment, transform, main;
# within: 60; set: first
# A process is forked while the metrics exporter's thread holds the registry's lock; the child
# counts, the parent joins it.
import multiprocessing
import threading
import time

multiprocessing.set_start_method("fork")


class Registry:
    def __init__(self):
        self.lock = threading.Lock()
        self.counters = {}

    def increment(self, name):
        with self.lock:
            self.counters[name] = self.counters.get(name, 0) + 1

    def export(self):
        """Writes all counters every second, with the lock, as a slow scrape does."""
        while True:
            with self.lock:
                for name in sorted(self.counters):
                    with open("metrics.prom", "w") as out:
                        out.write(f"{name} {self.counters[name]}\n")
                    time.sleep(0.05)
            time.sleep(0.01)


registry = Registry()


def transform(part):
    registry.increment("parts")
    return sum(i * i for i in range(part))


def main():
    for k in range(20):
        registry.increment(f"stage_{k}")
    threading.Thread(target=registry.export, daemon=True).start()
    time.sleep(0.5)
    while not registry.lock.locked():
        time.sleep(0.001)
    workers = [multiprocessing.Process(target=transform, args=(50_000 * k,)) for k in (1, 2)]
    for worker in workers:
        worker.start()
    print("fault", flush=True)
    for worker in workers:
        worker.join()
    print("all parts are transformed")


if __name__ == "__main__":
    main()
