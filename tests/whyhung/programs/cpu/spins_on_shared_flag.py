# due: HANG:loop or HANG:process or HANG:ended or HANG:polling or STALLED:polling or STALLED:loop;
# line: wait_for_slot; within: 60; runs: --pause 0.001 | --pause 0; set: late
# A reader asks a flag in shared memory again and again; the writer that was to set it has died
# (ring buffers).
import multiprocessing
import os
import time

from _shared import option

multiprocessing.set_start_method("fork")


def write(full, slot):
    for number in range(300):
        while full.value:
            time.sleep(0.0005)
        if number == 250:
            print("fault", flush=True)
            os._exit(1)
        slot.value = number
        full.value = 1


def wait_for_slot(full, slot, pause):
    while not full.value:
        if pause:
            time.sleep(pause)
    full.value = 0
    return slot.value


def main():
    pause = option("--pause", 0.001)
    full, slot = multiprocessing.Value("i", 0), multiprocessing.Value("i", 0)
    multiprocessing.Process(target=write, args=(full, slot), daemon=True).start()
    total = 0
    for _ in range(300):
        total += wait_for_slot(full, slot, pause)
    print(total)


if __name__ == "__main__":
    main()
