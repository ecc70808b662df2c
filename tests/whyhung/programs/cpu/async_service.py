# due: healthy; quiet: 25; runs: --wait client | --wait process; set: first
# An asyncio service waits 25 s for a client that thinks, or for a process that works.
import asyncio
import sys

from _shared import SCALE, option

WORK = "import sys, time; e = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < e: 1"


async def answer(reader, writer):
    while line := await reader.readline():
        writer.write(line.upper())
        await writer.drain()
    writer.close()


async def client(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for k in range(3):
        writer.write(f"request {k}\n".encode())
        await reader.readline()
        await asyncio.sleep(9 * SCALE)
    writer.close()


async def render():
    command = [sys.executable, "-c", WORK, str(26 * SCALE)]
    process = await asyncio.create_subprocess_exec(*command)
    return await process.wait()


async def serve(wait):
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print("quiet", flush=True)
    await (client(port) if wait == "client" else render())
    print("over", flush=True)
    server.close()


def main():
    asyncio.run(serve(option("--wait", "client", "process")))


if __name__ == "__main__":
    main()
