# due: healthy; quiet: 20; set: first
# A regular expression backtracks for 25 s in one call, which keeps the GIL, and then does not
# match.
import re
import threading
import time

from _shared import SCALE

PATTERN = re.compile(r"(\w+\s?)+#")


def seconds_of(length):
    start = time.process_time()
    PATTERN.match("a" * length)
    return time.process_time() - start


def main():
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    length = 14
    while seconds_of(length) < 0.7 * SCALE:
        length += 1
    taken = seconds_of(length)
    while taken < 24 * SCALE:
        length, taken = length + 1, taken * 2
    print("quiet", flush=True)
    print(PATTERN.match("a" * length))
    print("over", flush=True)


if __name__ == "__main__":
    main()
