"""A module that ends with its parent: `python -m nsa.lab.process.parent_death MODULE ARG...`."""

import runpy
import sys

from nsa.lab.process.family import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    del sys.argv[0]  # runpy puts the module's file in the place of its name
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
