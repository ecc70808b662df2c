"""Entry point of `python -m nsa`, the same as the command `nsa`, which is the workbook's."""

import runpy

if __name__ == "__main__":
    runpy.run_module("workbook", run_name="__main__", alter_sys=True)
