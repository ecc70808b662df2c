# due: HANG:lock or STALLED:lock; line: add, flush; within: 60; set: first
# A method flushes under a lock that it holds already.
import threading


class Metrics:
    def __init__(self):
        self.lock, self.values = threading.Lock(), []

    def add(self, value):
        with self.lock:
            self.values.append(value)
            if len(self.values) > 100:
                print("fault", flush=True)
                self.flush()

    def flush(self):
        with self.lock:
            self.values.clear()


def main():
    metrics = Metrics()
    for step in range(200):
        metrics.add(1 / (step + 1))


if __name__ == "__main__":
    main()
