# due: HANG:lock or HANG:process or HANG:worker or STALLED; line: count, count_all; within: 60;
# runs: --by process | --by pool; set: late
# We hold a lock that our workers need, and wait for them: for a process, or for a pool.
import multiprocessing

from _shared import option

lock = multiprocessing.Lock()


def count(k):
    with lock:
        return k


def count_all(by):
    with lock:
        print("fault", flush=True)
        if by == "pool":
            multiprocessing.Pool(2).map(count, range(4))
        child = multiprocessing.Process(target=count, args=(1,))
        child.start()
        child.join()


def main():
    by = option("--by", "process", "pool")
    count_all(by)


if __name__ == "__main__":
    main()
