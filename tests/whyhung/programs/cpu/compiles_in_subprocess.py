# due: healthy; quiet: 25; runs: --how run | --how poll | --how output; set: first
# Another process compiles for 25 s: main waits for it, asks again and again, or reads what it
# prints.
import subprocess
import sys
import time

from _shared import SCALE, option

BUILD = """
import ast, sys, time
end = time.monotonic() + float(sys.argv[1])
source = open(ast.__file__).read()
while time.monotonic() < end:
    compile(ast.parse(source), "ast.py", "exec")
print("built")
"""


def build(how, seconds):
    command = [sys.executable, "-c", BUILD, str(seconds)]
    if how == "run":
        return subprocess.run(command, check=True).returncode
    if how == "output":
        return subprocess.check_output(command, text=True).strip()
    builder = subprocess.Popen(command)
    while builder.poll() is None:
        time.sleep(0.5)
    return builder.returncode


def main():
    how = option("--how", "run", "poll", "output")
    print("quiet", flush=True)
    result = build(how, 25 * SCALE)
    print("over", flush=True)
    print(result)


if __name__ == "__main__":
    main()
