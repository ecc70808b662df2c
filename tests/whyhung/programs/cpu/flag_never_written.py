# due: STALLED:polling or HANG:polling; line: wait_for_index; within: 60;
# runs: --every 1 --say no | --every 0.2 --say yes; set: first
# A job waits for a flag that another job was to write, and that one failed (poll of a file on a
# shared disk).
import argparse
import os
import time


def build_index(folder):
    """Belongs to another job, which found no room on the disk."""
    return os.path.join(folder, "index.done")


def wait_for_index(flag, every, say):
    polls = 0
    while not os.path.exists(flag):
        time.sleep(every)
        polls += 1
        if say and polls % 25 == 0:
            print(f"still waiting for {flag} ({polls} polls)", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=float, default=1.0)
    parser.add_argument("--say", choices=("no", "yes"), default="no")
    args = parser.parse_args()
    flag = build_index(os.getcwd())
    print("fault", flush=True)
    wait_for_index(flag, args.every, args.say == "yes")
    print("index is there")


if __name__ == "__main__":
    main()
