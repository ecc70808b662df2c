# due: HANG:loop or HANG or STALLED; line: solve, step; within: 60; runs: --by nan | --by swing;
# set: late
# An iteration ends when its change is small: it is NaN, or swings between two values, for ever at
# 100 % of a core.
import math
import time

from _shared import option


def step(x, target, rate):
    return x - rate * (x - target)


def solve(target, rate):
    x = 0.0
    while True:
        new = step(x, target, rate)
        if abs(new - x) < 1e-9:
            return new
        x = new


def main():
    by = option("--by", "nan", "swing")
    for k in range(200):
        solve(k / 10, 0.5)
        time.sleep(0.005)
    print("fault", flush=True)
    if by == "nan":
        print(solve(math.nan, 0.5))
    print(solve(1.0, 2.0))


if __name__ == "__main__":
    main()
