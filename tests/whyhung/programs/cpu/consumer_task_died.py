# due: HANG:asyncio or HANG:future or HANG:thread or STALLED:asyncio or STALLED:event;
# line: crawl, main, consume; within: 60; runs: --ticker no | --ticker yes; set: first
# The only consumer of an asyncio queue died of an exception; the crawl waits in queue.join().
import asyncio

from _shared import option


async def consume(urls, pages):
    while True:
        url = await urls.get()
        await asyncio.sleep(0.002)
        pages[url] = len(url) / url.index("?")
        urls.task_done()


async def tick(pages):
    while True:
        await asyncio.sleep(0.1)
        sorted(pages, key=len)


async def crawl(ticker):
    urls, pages = asyncio.Queue(20), {}
    tasks = [asyncio.create_task(consume(urls, pages))]
    if ticker:
        tasks.append(asyncio.create_task(tick(pages)))
    for i in range(600):
        if i == 590:
            await asyncio.sleep(0.5)
            print("fault", flush=True)
        await urls.put(f"https://example.org/{i}?page=1" if i < 595 else f"broken {i}")
    await urls.join()
    return pages


def main():
    ticker = option("--ticker", "no", "yes")
    print(len(asyncio.run(crawl(ticker == "yes"))), "pages")


if __name__ == "__main__":
    main()
