"""Threads that wait in every way that Python has, each named by the way; runs in any Python."""

import json
import os
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from whyhung.watch import locks


class Account:
    held_by_class = threading.Lock()

    def __init__(self):
        self.lock, self.other = threading.Lock(), threading.RLock()
        self.table = {"a": threading.Lock()}
        self.condition = threading.Condition()
        self.asked = 0

    @property
    def secret(self):
        self.asked += 1
        return self.lock

    def holder(self):
        with self.lock, self.other, self.condition, self.table["a"]:
            forever.acquire()

    def with_lock(self):
        with self.lock:
            print("never")

    def second_item(self):
        with open("/dev/null") as _, self.lock:
            print("never")

    def with_rlock(self):
        with self.other:
            print("never")

    def acquires(self):
        if not self.lock.acquire():
            print("never")

    def acquires_for_a_while(self):
        self.lock.acquire(timeout=1000.0)

    def subscript(self):
        key = "a"
        with self.table[key]:
            print("never")

    def condition_lock(self):
        with self.condition:
            print("never")

    def asks_a_property(self):
        with self.secret:
            print("never")

    def twice(self):
        mine = threading.Lock()
        with mine, mine:
            print("never")

    def one(self):
        with first:
            time.sleep(0.3)
            with second:
                print("never")

    def two(self):
        second.acquire()
        time.sleep(0.3)
        first.acquire()

    def condition_wait(self):
        fine = threading.Condition()
        with fine:
            fine.wait()

    def event(self):
        never.wait()

    def event_for_a_while(self):
        never.wait(1000.0)

    def empty(self):
        channel = queue.Queue()
        channel.get()

    def full(self):
        channel = queue.Queue(1)
        channel.put(1)
        channel.put(2)

    def simple(self):
        channel = queue.SimpleQueue()
        channel.get()

    def semaphore(self):
        threading.Semaphore(0).acquire()

    def joins(self):
        named["event"].join()

    def future(self):
        with ThreadPoolExecutor(1, "pool") as pool:
            pool.submit(never.wait).result()

    def sleeps(self):
        with Account.held_by_class:
            time.sleep(1000.0)

    def of_a_class(self):
        with Account.held_by_class:
            print("never")


def lets_go():
    with let_go:
        let_go.wait()


def takes_it():
    with let_go:
        print_slowly.acquire()


def asks_for_it():
    let_go.acquire()


let_go, print_slowly = threading.Condition(threading.Lock()), threading.Lock()
print_slowly.acquire()
forever, never = threading.Lock(), threading.Event()
forever.acquire()
first, second = threading.Lock(), threading.Lock()
account, named = Account(), {}


def main():
    ways = [getattr(account, name) for name in vars(Account) if name not in NO_WAYS]
    ways.sort(key=lambda way: way.__name__ not in ("holder", "sleeps"))
    for way in [*ways, lets_go, takes_it, asks_for_it]:
        name = way.__name__
        named[name] = threading.Thread(target=way, name=name, daemon=True)
        named[name].start()
        time.sleep(0.02)  # they come in this order
    time.sleep(0.5)
    reading = locks._Reading()
    began = time.perf_counter()
    found = reading.waits()
    seconds = time.perf_counter() - began
    tids = {thread.native_id: name for name, thread in named.items()}
    tids[os.getpid()] = "main"
    for one in found:
        one["holders"] = [tids.get(tid, tid) for tid in one["holders"]]
    waits = {one["thread"]: one for one in found}
    told = {"waits": waits, "seconds": seconds, "asked": account.asked, "errors": reading.errors}
    print(json.dumps(told), flush=True)
    os._exit(0)


NO_WAYS = "__module__", "__init__", "__dict__", "__weakref__", "__doc__", "secret", "held_by_class"
NO_WAYS += "__static_attributes__", "__firstlineno__"

if __name__ == "__main__":
    main()
