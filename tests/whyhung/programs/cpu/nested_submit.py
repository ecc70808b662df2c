# due: HANG:thread or HANG:lock or HANG:future or STALLED:lock or STALLED:thread;
# line: read_shard, read_index, read_all; within: 60; set: first
# Tasks of a thread pool wait for tasks that they submit to the same pool: all its threads wait.
import concurrent.futures
import time

pool = concurrent.futures.ThreadPoolExecutor(max_workers=4)


def read_index(shard):
    time.sleep(0.01)
    return list(range(shard, shard + 10))


def read_shard(shard):
    index = pool.submit(read_index, shard)
    return sum(index.result())


def read_all(shards):
    return [task.result() for task in [pool.submit(read_shard, shard) for shard in shards]]


def main():
    for shard in range(20):  # one at a time it works
        read_all([shard])
    print("fault", flush=True)
    print(sum(read_all(range(64))))


if __name__ == "__main__":
    main()
