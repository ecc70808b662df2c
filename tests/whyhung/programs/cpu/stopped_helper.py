# due: STALLED:stopped or HANG:stopped or STALLED:child; line: ask_helper; within: 60;
# runs: --heartbeat no | --heartbeat yes; set: late
# A helper process was stopped (Ctrl-Z in its terminal, a suspended job); its parent waits for an
# answer.
import os
import signal
import subprocess
import sys
import threading
import time

from _shared import option

HELPER = """
import sys
for line in sys.stdin:
    print(sum(map(int, line.split())), flush=True)
"""


def ask_helper(helper, numbers):
    helper.stdin.write(" ".join(map(str, numbers)) + "\n")
    helper.stdin.flush()
    return int(helper.stdout.readline())


def heartbeat():
    while True:
        time.sleep(0.2)
        sorted(range(40_000), key=lambda i: -i)


def main():
    if option("--heartbeat", "no", "yes") == "yes":
        threading.Thread(target=heartbeat, daemon=True).start()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    helper = subprocess.Popen([sys.executable, "-c", HELPER], **pipes)
    for i in range(400):
        if i == 200:
            print("fault", flush=True)
            os.kill(helper.pid, signal.SIGSTOP)
        ask_helper(helper, range(i))
        time.sleep(0.005)


if __name__ == "__main__":
    main()
