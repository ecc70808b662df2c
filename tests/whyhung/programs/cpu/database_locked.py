# due: STALLED:file lock or STALLED:flock or STALLED:polling or HANG:polling or STALLED:timer;
# line: add_row; within: 60; set: late
# Another process began a transaction of the experiment database and sleeps; SQLite asks again for
# up to an hour.
import sqlite3
import subprocess
import sys

HOLDER = """
import sqlite3, time
database = sqlite3.connect("runs.db", isolation_level=None)
database.execute("begin exclusive")
print("begun", flush=True)
time.sleep(7200)
"""


def add_row(database, step):
    with database:
        database.execute("insert into losses values (?, ?)", (step, 1 / (step + 1)))


def main():
    database = sqlite3.connect("runs.db", timeout=3600)
    database.execute("create table losses (step integer, loss real)")
    for step in range(100):
        add_row(database, step)
    command = [sys.executable, "-c", HOLDER]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    holder.stdout.readline()
    print("fault", flush=True)
    add_row(database, 100)
    print("stored", flush=True)


if __name__ == "__main__":
    main()
