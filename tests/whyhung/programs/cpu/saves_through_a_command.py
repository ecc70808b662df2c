# due: healthy; quiet: 25; runs: --by pipe | --by communicate; set: late
# A checkpoint goes through a slow compressor: torch.save into its pipe, or communicate with it.
import subprocess

import torch
from _shared import SCALE, option


def save(weights, by):
    piece = f"sleep {1.3 * SCALE}; [ $(head -c 65536 | wc -c) -gt 0 ]"
    slow = f"while {piece}; do :; done" if by == "pipe" else f"sleep {26 * SCALE}; wc -c"
    with subprocess.Popen(slow, shell=True, stdin=-1, stdout=-1) as command:
        if by == "pipe":
            torch.save(weights, command.stdin)
        else:
            command.communicate(weights.numpy().tobytes())


def main():
    by = option("--by", "pipe", "communicate")
    weights = torch.ones(2**18 + 2**17)
    print("quiet", flush=True)
    save(weights, by)
    print("over", flush=True)


if __name__ == "__main__":
    main()
