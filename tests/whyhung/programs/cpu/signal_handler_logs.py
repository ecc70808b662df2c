# due: HANG:lock or STALLED:lock; line: write_event, save_on_signal, main; within: 60; set: late
# A signal comes while main writes an event with the lock held; the handler writes one too
# (SIGUSR1 of a scheduler).
import json
import os
import signal
import threading
import time


class EventLog:
    def __init__(self, path):
        self.path, self.lock = path, threading.Lock()

    def write_event(self, **event):
        with self.lock:
            with open(self.path, "a") as file:
                file.write(json.dumps(event) + "\n")
            if event.get("step") == 300:  # the scheduler's signal happens to come here
                print("fault", flush=True)
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.1)


log = EventLog("events.jsonl")


def save_on_signal(number, frame):
    log.write_event(signal=number)


def main():
    signal.signal(signal.SIGUSR1, save_on_signal)
    for step in range(500):
        log.write_event(step=step, loss=1 / (step + 1))
        time.sleep(0.003)


if __name__ == "__main__":
    main()
