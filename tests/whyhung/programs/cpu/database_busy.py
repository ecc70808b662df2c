# due: healthy; quiet: 25; runs: --by timeout | --by retries; set: late
# Another job's transaction keeps the results' database for 25 s: a long timeout, or retries.
import contextlib
import os
import sqlite3
import subprocess
import sys
import tempfile
import time

from _shared import SCALE, option

HOLD = """
import sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("begin exclusive")
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def add_row(path, by):
    while True:
        patience = 300 if by == "timeout" else 0.5
        with (
            contextlib.suppress(sqlite3.OperationalError),
            sqlite3.connect(path, timeout=patience) as database,
        ):
            return database.execute("insert into runs values (0.5)").rowcount
        time.sleep(1)


def main():
    by = option("--by", "timeout", "retries")
    path = os.path.join(tempfile.mkdtemp(), "runs.db")
    sqlite3.connect(path).execute("create table runs (loss)").connection.close()
    command = [sys.executable, "-c", HOLD, path, str(26 * SCALE)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE)
    other.stdout.readline()
    print("quiet", flush=True)
    add_row(path, by)
    print("over", flush=True)
    other.wait()


if __name__ == "__main__":
    main()
