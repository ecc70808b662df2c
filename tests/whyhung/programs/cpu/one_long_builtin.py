# due: healthy; quiet: 20; runs: --what digits | --what sort; set: late
# One call of Python itself takes 25 s and keeps the GIL: the digits of a large number, a sort of
# a long list.
import random
import sys
import threading
import time

from _shared import SCALE, option

sys.set_int_max_str_digits(0)


def digits(size):
    number = 7 ** int(size * 12_000)
    start = time.process_time()
    str(number)
    return time.process_time() - start


def order(size):
    draw = random.Random(0)
    values = [(draw.randrange(1000), draw.random()) for _ in range(int(size * 20_000))]
    start = time.process_time()
    sorted(values, key=lambda pair: sorted(str(pair)))
    return time.process_time() - start


def main():
    what = option("--what", "digits", "sort")
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    call, power = (digits, 2.0) if what == "digits" else (order, 1.0)
    size = 1.0
    while (taken := call(size)) < 0.4 * SCALE:
        size *= 1.5
    size *= (29 * SCALE / taken) ** (1 / power)
    print("quiet", flush=True)
    call(size)
    print("over", flush=True)


if __name__ == "__main__":
    main()
