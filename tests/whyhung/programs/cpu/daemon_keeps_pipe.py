# due: STALLED:pipe or STALLED:child or HANG:pipe; line: start_service; within: 60; set: first
# A script puts a service in the background, which keeps the pipe: run(capture_output=True) waits
# for its end.
import subprocess
import time


def start_service(command):
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    return done.stdout.strip()


def main():
    print(start_service("echo ready"), flush=True)
    time.sleep(1)
    print("fault", flush=True)
    print(start_service("sleep 7200 & echo ready"), flush=True)


if __name__ == "__main__":
    main()
