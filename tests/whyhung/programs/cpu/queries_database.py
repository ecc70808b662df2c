# due: healthy; quiet: 22; runs: --query count | --query join; set: first
# One statement of SQLite runs for 25 s.
import sqlite3
import time

from _shared import SCALE, option

COUNT = """
with recursive numbers(n) as (select 1 union all select n + 1 from numbers where n < {})
select sum(n * n % 7) from numbers
"""
JOIN = "select count(*) from samples a, samples b where a.id < {} and (a.size + b.size) % 3 = 1"


def run(database, statement, size):
    start = time.process_time()
    value = database.execute(statement.format(size)).fetchone()[0]
    return value, time.process_time() - start


def main():
    query = option("--query", "count", "join")
    database = sqlite3.connect("samples.db")
    database.execute("create table samples (id integer primary key, size integer)")
    rows = [(i, i * i % 1009) for i in range(20_000)]
    database.executemany("insert into samples values (?, ?)", rows)
    statement, few = (COUNT, 1_000_000) if query == "count" else (JOIN, 50)
    taken = min(run(database, statement, few)[1] for _ in range(3))
    size = int(few * 30 * SCALE / taken)
    print("quiet", flush=True)
    value, _ = run(database, statement, size)
    print("over", flush=True)
    print(value)


if __name__ == "__main__":
    main()
