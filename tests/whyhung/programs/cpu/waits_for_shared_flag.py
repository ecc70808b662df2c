# due: healthy; quiet: 25; runs: --pause 0 | --pause 0.01; set: late
# A feeder fills shared memory for 25 s and sets a flag in it, for which main spins or naps.
import multiprocessing
import time
from multiprocessing import shared_memory

from _shared import SCALE, option


def fill(name):
    memory, end, total = shared_memory.SharedMemory(name), time.monotonic() + 25.5 * SCALE, 0
    while time.monotonic() < end:
        total = (total + sum(range(1000))) % 251
        memory.buf[1] = total
    memory.buf[0] = 1
    memory.close()


def wait_for_data(memory, pause):
    while not memory.buf[0]:
        time.sleep(pause)


def main():
    pause = option("--pause", 0.0)
    memory = shared_memory.SharedMemory(create=True, size=64)
    feeder = multiprocessing.Process(target=fill, args=(memory.name,))
    feeder.start()
    print("quiet", flush=True)
    wait_for_data(memory, pause)
    print("over", flush=True)
    feeder.join()
    memory.close()
    memory.unlink()


if __name__ == "__main__":
    main()
