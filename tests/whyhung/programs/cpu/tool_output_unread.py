# due: HANG:pipe or HANG:child or HANG:process or STALLED:pipe or STALLED:child; line: convert;
# within: 60; set: first
# A converter writes more than a pipe holds; its output is read only after wait() (subprocess with
# PIPE).
import subprocess
import sys

CONVERTER = """
import sys
for frame in range(20_000):
    print(f"frame {frame}: decoded, scaled, encoded", file=sys.stderr)
print("converted")
"""


def convert(name):
    command = [sys.executable, "-c", CONVERTER, name]
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if tool.wait() != 0:
        raise RuntimeError(tool.stderr.read())
    return tool.stdout.read()


def main():
    print("fault", flush=True)
    print(convert("clip.mp4"))


if __name__ == "__main__":
    main()
