# due: HANG:future or HANG:asyncio or HANG:thread or HANG:lock or STALLED:lock or STALLED:future;
# line: fetch_sync, get; within: 60; set: late
# A callback of the event loop waits for a coroutine that the same loop is to run
# (run_coroutine_threadsafe(...).result()).
import asyncio
import threading
import time


class Client:
    def __init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    async def fetch(self, key):
        await asyncio.sleep(0.01)
        return key * 2

    def fetch_sync(self, key):
        return asyncio.run_coroutine_threadsafe(self.fetch(key), self.loop).result()

    async def fetch_with_default(self, key):
        return self.fetch_sync(key) or 7  # looks harmless, and is in the loop's own thread

    def get(self, key):
        return asyncio.run_coroutine_threadsafe(self.fetch_with_default(key), self.loop).result()


def main():
    client = Client()
    print(sum(client.fetch_sync(key) for key in range(100)), flush=True)
    time.sleep(0.5)
    print("fault", flush=True)
    print(client.get(0), flush=True)


if __name__ == "__main__":
    main()
