# due: STALLED:terminal or STALLED:pipe or STALLED; line: overwrite; within: 60;
# runs: --how input | --how breakpoint; set: first
# A question, or a breakpoint that was left in, reads an input that stays silent.
import os
import subprocess
import sys

from _shared import option


def overwrite(how):
    if how == "input":
        return input("Overwrite the checkpoint? [y/N] ")
    return breakpoint()


def main():
    how = option("--how", "input", "breakpoint")
    silent = f"while [ -d /proc/{os.getpid()} ]; do sleep 1; done"
    asker = subprocess.Popen(["sh", "-c", silent], stdout=subprocess.PIPE)
    os.dup2(asker.stdout.fileno(), 0)
    sys.stdin = os.fdopen(0, closefd=False)
    print("fault", flush=True)
    overwrite(how)


if __name__ == "__main__":
    main()
