# due: HANG:lock or HANG:process or HANG:ended or HANG:child or STALLED:lock or STALLED:process;
# line: simulate, main; within: 60; runs: --joined yes | --joined no; set: late
# Three simulators meet after each round; one has returned early, the others wait for it
# (multiprocessing.Barrier).
import multiprocessing
import time

from _shared import option

multiprocessing.set_start_method("fork")


def simulate(barrier, number, rounds):
    for turn in range(rounds):
        sum(i * i for i in range(1000 * (number + 1)))
        if number == 2 and turn == 60:
            print("fault", flush=True)
            return  # its episode is over
        barrier.wait()


def main():
    joined = option("--joined", "yes", "no")
    parties = 3 + (joined == "no")
    barrier = multiprocessing.Barrier(parties)
    workers = [
        multiprocessing.Process(target=simulate, args=(barrier, number, 200)) for number in range(3)
    ]
    for worker in workers:
        worker.start()
    for _ in range(200 * (joined == "no")):
        barrier.wait()
        time.sleep(0.01)
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
