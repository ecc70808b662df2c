"""A module that ends with whoever started it: `python -m nsa.lab.bound MODULE ARGUMENT...`."""

import runpy
import sys

from nsa.lab.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    del sys.argv[0]  # runpy puts the module's file in the place of its name
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
