# due: HANG:thread or HANG:lock or STALLED:thread or STALLED:lock; line: emit, send, send_locked;
# within: 60; runs: --by join | --by lock; set: late
# A log's handler waits for a thread that logs, or for a lock whose owner logs.
import logging
import threading

from _shared import option


class Uploads(logging.Handler):
    def __init__(self, send):
        super().__init__()
        self.send = send

    def emit(self, record):
        self.send()


def main():
    by = option("--by", "join", "lock")
    log, ours, sending = logging.Logger("training"), threading.Lock(), threading.Event()
    other = threading.Thread(target=log.warning, args=("loss rises",), daemon=True)

    def send():
        other.start()
        other.join()

    def send_locked():
        sending.set()
        with ours:
            pass

    log.addHandler(Uploads(send if by == "join" else send_locked))
    print("fault", flush=True)
    with ours:
        if by == "lock":
            other.start()
            sending.wait()
        log.warning("accuracy falls")


if __name__ == "__main__":
    main()
