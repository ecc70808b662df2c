# due: HANG:lock or HANG:thread or HANG:import or STALLED:lock or STALLED:thread;
# line: warm_up, load, use_plugin; within: 60; set: late
# A plugin starts a thread when it is imported and joins it; the thread imports the plugin (the
# import lock).
import importlib
import pathlib
import sys
import time

PLUGIN = """
import threading

def load():
    from plugin_of_mine import scale
    return scale

def warm_up():
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()

warm_up()
scale = 3
"""


def use_plugin():
    return importlib.import_module("plugin_of_mine").scale


def main():
    pathlib.Path("plugin_of_mine.py").write_text(PLUGIN)
    sys.path.insert(0, "")
    time.sleep(1)
    print("fault", flush=True)
    print(use_plugin())


if __name__ == "__main__":
    main()
