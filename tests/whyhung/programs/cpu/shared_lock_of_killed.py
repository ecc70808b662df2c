# due: HANG:lock or HANG:process or HANG:ended or STALLED:lock; line: record, main; within: 60;
# set: late
# A worker is killed while it holds the lock of a shared array; the others and main wait for that
# lock.
import ctypes
import multiprocessing
import os
import signal
import time

multiprocessing.set_start_method("fork")


def record(scores, number, value):
    with scores.get_lock():
        if value > 0.9:
            print("fault", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)  # memory ran out here
        scores[number % len(scores)] += value


def work(scores, values):
    for number, value in enumerate(values):
        record(scores, number, value)
        time.sleep(0.01)


def main():
    scores = multiprocessing.Array(ctypes.c_double, 16)
    bad = [0.1] * 60 + [1.0] + [0.1] * 500
    workers = [
        multiprocessing.Process(target=work, args=(scores, values))
        for values in ([0.1] * 500, [0.2] * 500, bad)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(list(scores))


if __name__ == "__main__":
    main()
