"""Start ipykernel so that it dies with the runner, also when it is stuck in C holding the GIL.

Run as a script by `nsa.workbook.engine`; an idle kernel notices a vanished parent by itself, a
stuck one stays for ever without this.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    runner = int(os.environ.pop("NSA_RUNNER_PID"))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != runner:  # it died before the request stood
            return
    # a script's own folder comes first on sys.path, and would shadow modules by its file names
    del sys.path[0]
    from ipykernel import kernelapp

    kernelapp.launch_new_instance()


if __name__ == "__main__":
    main()
