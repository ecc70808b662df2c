# due: healthy; quiet: 25; runs: --by main | --by thread; set: late
# A plugin asks its licence server for 25 s while it is imported, by main or by a thread before it.
import importlib
import os
import sys
import tempfile
import threading
import time

from _shared import SCALE, option


def write_plugin(seconds):
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "licensed_plugin.py"), "w") as file:
        file.write(f"import time\n\ntime.sleep({seconds})\nTABLE = {{}}\n")
    sys.path.insert(0, folder)


def load():
    return importlib.import_module("licensed_plugin").TABLE


def main():
    by = option("--by", "main", "thread")
    write_plugin(26 * SCALE)
    print("quiet", flush=True)
    if by == "thread":
        threading.Thread(target=load).start()
        time.sleep(0.5 * SCALE)
    load()
    print("over", flush=True)


if __name__ == "__main__":
    main()
