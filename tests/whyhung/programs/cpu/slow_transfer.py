# due: healthy; quiet: 25; runs: --way up | --way down | --way trickle; set: first
# A file goes up or comes down at 200 kB a second for 25 s, or in one piece each 3 s.
import os
import socket
import threading
import time

from _shared import SCALE, option

RATE = 200_000


def take(connection, seconds):
    for _ in range(max(1, int(seconds * 10))):
        connection.recv(RATE // 10, socket.MSG_WAITALL)
        time.sleep(0.1)
    connection.sendall(b"ok")


def give(connection, seconds, pause):
    for _ in range(max(1, int(seconds / pause))):
        connection.sendall(bytes(int(RATE * pause) if pause < 1 else 100))
        time.sleep(pause)
    connection.close()


def serve(listener, way, seconds):
    connection, _ = listener.accept()
    if way == "up":
        take(connection, seconds)
    else:
        give(connection, seconds, 0.1 if way == "down" else 3 * SCALE)


def transfer(address, way, seconds):
    with socket.create_connection(address) as connection:
        if way == "up":
            connection.sendall(os.urandom(max(1, int(seconds * 10)) * (RATE // 10)))
            return connection.recv(2)
        count = 0
        while part := connection.recv(65536):
            count += len(part)
        return count


def main():
    way = option("--way", "up", "down", "trickle")
    listener, seconds = socket.create_server(("127.0.0.1", 0)), 27 * SCALE
    threading.Thread(target=serve, args=(listener, way, seconds), daemon=True).start()
    print("quiet", flush=True)
    result = transfer(listener.getsockname(), way, seconds)
    print("over", flush=True)
    print(result)


if __name__ == "__main__":
    main()
