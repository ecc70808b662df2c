# due: healthy; quiet: 25; runs: --keepalive no | --keepalive yes; set: late
# A server of selectors waits 25 s for its client, a process that thinks; a thread keeps
# statistics meanwhile.
import selectors
import socket
import subprocess
import sys
import threading
import time

from _shared import SCALE, option

CLIENT = """
import socket, sys, time
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    sum(i * i for i in range(20_000))
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.sendall(b"predict")
    connection.recv(16)
"""


def keep_statistics(history):
    while True:
        history.append(sum(i % 3 for i in range(30_000)))
        time.sleep(0.2)


def serve(listener):
    with selectors.DefaultSelector() as chosen:
        chosen.register(listener, selectors.EVENT_READ)
        while not chosen.select(timeout=5):
            pass
    connection, _ = listener.accept()
    with connection:
        asked = connection.recv(16)
        connection.sendall(b"0.5")
    return asked


def main():
    if option("--keepalive", "no", "yes") == "yes":
        threading.Thread(target=keep_statistics, args=([],), daemon=True).start()
    listener = socket.create_server(("127.0.0.1", 0))
    command = [sys.executable, "-c", CLIENT, str(listener.getsockname()[1]), str(25 * SCALE)]
    client = subprocess.Popen(command, start_new_session=True)
    print("quiet", flush=True)
    print(serve(listener))
    print("over", flush=True)
    client.wait()


if __name__ == "__main__":
    main()
