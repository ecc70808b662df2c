"""Kernel of a notebook on the interpreter of this process, with the package that runs it."""

import sys
from uuid import uuid4

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

# An idle kernel notices a vanished parent by itself; one stuck in C, holding the GIL, would run
# forever unless the system ends it. The first folder on sys.path could shadow modules.
START = """\
import sys
del sys.path[0]
from whyhung.process.family import die_with_parent
die_with_parent()
from ipykernel import kernelapp
kernelapp.launch_new_instance()
"""


class OwnInterpreter(KernelSpecManager):
    """Starts every kernel with the interpreter of this process, whatever specs are installed.

    Callers pass `whyhung.process.family.environment`, or the kernel cannot find this package.
    """

    def get_kernel_spec(self, kernel_name):
        argv = [sys.executable, "-Xfrozen_modules=off", "-c", START, "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def kernel_manager(config=None) -> AsyncKernelManager:
    """Kernel manager, not started, for this process's interpreter.

    A free TCP port is found by one process and bound by another, so that kernels of several jobs
    that start together on a host can take each other's. On Linux sockets have names of their own
    instead, which need no file; see unix(7), "abstract".
    """
    own = {"transport": "ipc", "ip": f"@nsa-{uuid4()}"} if sys.platform == "linux" else {}
    return AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=OwnInterpreter(), config=config, **own
    )
