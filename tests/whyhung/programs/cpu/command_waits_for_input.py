# due: HANG:process or HANG:pipe or HANG:child or STALLED:process or STALLED:pipe; line: compress;
# within: 60; runs: --sent little | --sent much; set: late
# A command reads until its stdin is closed, and we wait for it; or both fill their pipes.
import subprocess

from _shared import option


def compress(data):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as command:
        command.stdin.write(data)
        command.stdin.flush()
        command.wait()


def main():
    sent = option("--sent", "little", "much")
    print("fault", flush=True)
    compress(bytes(2**20 if sent == "much" else 100))


if __name__ == "__main__":
    main()
