# due: healthy; quiet: 25; set: first
# A heap of some million objects is walked by the garbage collector again and again for 25 s.
import gc
import time

from _shared import SCALE


class Node:
    def __init__(self, number):
        self.number, self.links = number, []


def build(count):
    nodes = [Node(i) for i in range(count)]
    for i, node in enumerate(nodes):
        node.links.append(nodes[(i * 7 + 1) % count])
    return nodes


def tidy(seconds):
    """Frees what each of many requests left, and never finds anything."""
    end, freed = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        freed += gc.collect()
    return freed


def main():
    nodes = build(1_500_000)
    print("quiet", flush=True)
    freed = tidy(25 * SCALE)
    print("over", flush=True)
    print(len(nodes), "nodes,", freed, "freed")


if __name__ == "__main__":
    main()
