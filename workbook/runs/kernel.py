"""Kernel of a notebook on the interpreter of this process, with the package that runs it."""

import sys

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
    """Kernel manager, not started, for this process's interpreter."""
    return AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=OwnInterpreter(), config=config
    )
