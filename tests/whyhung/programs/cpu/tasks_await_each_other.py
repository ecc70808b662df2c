# due: HANG:asyncio or HANG:future or HANG:thread or STALLED:asyncio or STALLED:event;
# line: answer, after; within: 60; runs: --how future | --how events; set: first
# Nobody is left to resolve what a coroutine awaits: a future, or an event that waits for its own.
import asyncio

from _shared import option


async def after(mine, other):
    await other.wait()
    mine.set()


async def answer(how):
    print("fault", flush=True)
    if how == "future":
        return await asyncio.get_running_loop().create_future()
    first, second = asyncio.Event(), asyncio.Event()
    return await asyncio.gather(after(first, second), after(second, first))


def main():
    how = option("--how", "future", "events")
    asyncio.run(answer(how))


if __name__ == "__main__":
    main()
