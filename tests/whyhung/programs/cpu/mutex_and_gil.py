# due: HANG:lock or HANG:gil or HANG:mutex or HANG or STALLED; line: write_record, drain;
# within: 60; set: first
# A C library's mutex is held by a thread that needs the GIL, while main holds the GIL and needs
# the mutex.
import ctypes
import threading
import time

releases = ctypes.CDLL(None)  # its calls let other threads run
keeps = ctypes.PyDLL(None)  # its calls keep the GIL
mutex = ctypes.create_string_buffer(64)  # a pthread_mutex_t of zeros is one that is free


def drain(records):
    """Takes the library's mutex, and formats in Python what it found."""
    while True:
        releases.pthread_mutex_lock(mutex)
        " ".join(str(record) for record in records[-500:])
        time.sleep(0.01)
        releases.pthread_mutex_unlock(mutex)
        time.sleep(0.05)


def write_record(records, i, library):
    library.pthread_mutex_lock(mutex)
    records.append(i)
    library.pthread_mutex_unlock(mutex)


def main():
    records = []
    threading.Thread(target=drain, args=(records,), daemon=True).start()
    for i in range(20):
        write_record(records, i, releases)
        time.sleep(0.05)
    print("fault", flush=True)
    for i in range(2000):
        write_record(records, i, keeps)
        time.sleep(0.001)
    print("all records are written")


if __name__ == "__main__":
    main()
