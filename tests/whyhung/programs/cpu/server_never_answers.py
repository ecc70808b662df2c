# due: STALLED:socket or HANG:socket; line: log_metrics; within: 60;
# runs: --side thread | --side process; set: first
# A tracking server accepts the request and never answers; the client has no timeout (requests
# without timeout=).
import http.client
import multiprocessing
import socket
import threading
import time

from _shared import option


def serve(listener):
    """Answers ten requests, then stops answering."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    for _ in range(10):
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(answer)
        connection.close()
    kept = listener.accept()
    time.sleep(3600)
    kept[0].close()


def log_metrics(port, step):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/metrics", f'{{"step": {step}}}')
    return connection.getresponse().read()


def main():
    side = option("--side", "thread", "process")
    listener = socket.create_server(("127.0.0.1", 0))
    kinds = {"thread": threading.Thread, "process": multiprocessing.Process}
    kinds[side](target=serve, args=(listener,), daemon=True).start()
    for step in range(20):
        if step == 10:
            print("fault", flush=True)
        log_metrics(listener.getsockname()[1], step)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
