# due: STALLED or HANG; line: next_score; within: 60; runs: --left queue | --left lock; set: late
# An evaluator behind a Manager was killed: its queue stays empty, or the lock that it held is held.
import multiprocessing
import os
import signal

from _shared import option


def evaluate(scores, lock):
    lock.acquire()
    scores.put(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def next_score(scores, lock, left):
    if left == "lock":
        lock.acquire()
    return scores.get()


def main():
    left = option("--left", "queue", "lock")
    with multiprocessing.Manager() as manager:
        scores, lock = manager.Queue(), manager.Lock()
        evaluator = multiprocessing.Process(target=evaluate, args=(scores, lock))
        evaluator.start()
        scores.get()
        evaluator.join()
        print("fault", flush=True)
        next_score(scores, lock, left)


if __name__ == "__main__":
    main()
