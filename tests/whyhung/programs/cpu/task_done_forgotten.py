# due: HANG:queue or HANG:thread or HANG:lock or HANG:event or STALLED:queue or STALLED:lock;
# line: upload_all; within: 60; set: late
# A worker skips a bad item without task_done, so that join waits though the queue is empty and
# all workers idle.
import queue
import threading
import time


def upload(items, done):
    while True:
        name = items.get()
        if not name:
            continue
        time.sleep(0.01)
        done.append(name)
        items.task_done()


def upload_all(names):
    items, done = queue.Queue(), []
    for _ in range(3):
        threading.Thread(target=upload, args=(items, done), daemon=True).start()
    for name in names:
        items.put(name)
    items.join()
    return done


def main():
    names = [f"part-{i}" for i in range(150)]
    print(len(upload_all(names)), "uploaded", flush=True)
    names[70] = ""
    print("fault", flush=True)
    print(len(upload_all(names)), "uploaded", flush=True)


if __name__ == "__main__":
    main()
