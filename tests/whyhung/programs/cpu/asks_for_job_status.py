# due: healthy; quiet: 25; runs: --every 2 | --every 8; set: late
# Main asks a service each few seconds over HTTP if its job is done; it is after 25 s.
import http.server
import json
import threading
import time
import urllib.request

from _shared import SCALE, option

BEGUN = time.monotonic()


class Status(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        done = time.monotonic() > BEGUN + 26 * SCALE
        body = json.dumps({"state": "SUCCEEDED" if done else "RUNNING"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def wait_for_job(url, every):
    while True:
        with urllib.request.urlopen(url, timeout=30) as answer:
            if json.load(answer)["state"] != "RUNNING":
                return
        time.sleep(every * SCALE)


def main():
    every = option("--every", 2.0)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Status)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("quiet", flush=True)
    wait_for_job(f"http://127.0.0.1:{server.server_address[1]}/job/7", every)
    print("over", flush=True)


if __name__ == "__main__":
    main()
