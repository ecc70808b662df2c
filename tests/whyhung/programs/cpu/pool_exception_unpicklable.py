# due: HANG:thread or HANG:lock or HANG:process or STALLED:lock or STALLED:thread; line: parse_all;
# within: 60; set: first
# A task raises an exception that cannot be unpickled: the pool's result thread dies, and map
# waits for ever.
import multiprocessing
import time


class ParseError(Exception):
    def __init__(self, name, line):
        super().__init__(f"{name}, line {line}")
        self.name, self.line = name, line


def parse(number):
    time.sleep(0.01)
    if number == 150:
        print("fault", flush=True)
        raise ParseError(f"part-{number}", 7)
    return number % 13


def parse_all(count):
    with multiprocessing.Pool(2) as pool:
        return pool.map(parse, range(count), chunksize=1)


def main():
    print(sum(parse_all(100)), flush=True)
    print(sum(parse_all(300)), flush=True)


if __name__ == "__main__":
    main()
