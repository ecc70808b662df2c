"""Runs pytest in copies of the project, each in a fork of one process that has loaded torch once.

A program of its own: nsa must not be loaded before the copy is chosen. Reads from standard input a
JSON list of [folder of the copy, pytest's arguments], and prints one of [exit status, output].
"""

import json
import os
import sys
import tempfile
import traceback

import pytest  # its plugins are not loaded here: each fork rewrites their assertions
import torch._dynamo
import triton  # noqa: F401


def run(root: str, arguments: list[str]) -> list:
    """[exit status, output] of pytest in a fork whose current folder and first path is `root`."""
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        child = os.fork()
        if child == 0:
            status = 99
            try:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                os.chdir(root)
                sys.path[:] = [root, *sys.path[1:]]  # in the place of this program's folder
                status = int(pytest.main(arguments))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        file.seek(0)
        return [os.waitstatus_to_exitcode(status), file.read()]


if __name__ == "__main__":
    torch.set_num_threads(1)  # a thread that a fork leaves behind would be waited for
    print(json.dumps([run(*one) for one in json.load(sys.stdin)]))
